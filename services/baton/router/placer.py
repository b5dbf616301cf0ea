"""From a prompt and the workers at hand to who answers it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from baton.router.placement import Decision, PlacementOptions, Prompt, Standing, WorkerReport, choose
from baton.router.placement.options import FIRST_TOKENS_PER_S

log = logging.getLogger(__name__)


class Placer:
    """Asks the policy, and keeps what it would work out again and again."""

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options
        self._standings: dict[str, Standing] = {}
        self._tokens_per_s = FIRST_TOKENS_PER_S
        """Measured last by any worker: taken for those that have not measured."""

    def place(self, request_id: str, num_tokens: int, reports: Iterable[WorkerReport]) -> Decision | None:
        """None: nobody can answer."""
        standings = [self._standing(report) for report in reports]
        decision = choose(Prompt(num_tokens), standings, self._options)
        if decision is not None and log.isEnabledFor(logging.DEBUG):
            log.debug("request %s is placed: %s", request_id, decision)
        return decision

    def _standing(self, report: WorkerReport) -> Standing:
        known = self._standings.get(report.address)
        if known is not None and known.report is report:
            return known
        self._tokens_per_s = report.prefill_tokens_per_s or self._tokens_per_s
        standing = Standing.of(report, self._options, self._tokens_per_s)
        self._standings[report.address] = standing
        return standing

    def forget(self, address: str) -> None:
        """The worker is gone."""
        self._standings.pop(address, None)
