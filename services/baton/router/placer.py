"""From a prompt and the workers at hand to who answers it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from baton.router.placement import Decision, PlacementOptions, Prompt, Standing, WorkerReport, choose
from baton.router.placement.options import Speeds
from baton.router.placement.standing import FIRST_SPEEDS
from baton.router.prefixes import Prefixes
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SWEEP_BLOCKS = 5000
"""Traces of workers that are gone to be cleared at each tick: under 2 ms."""
CHANGE = 0.1
"""Of what is usual, for all to be worked out anew."""
WEIGHT = 0.1
"""Of the newest report in what is usual."""


class Placer:
    """Asks the policy, and keeps what it would work out again and again."""

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options
        self._prefixes = Prefixes()
        self._standings: dict[str, Standing] = {}
        self._seen = Speeds()
        """Of the workers that have measured theirs, smoothed."""
        self._usual = Speeds()
        """The same, but for small changes: it is equal for all workers that are compared."""

    def place(
        self,
        request_id: str,
        token_ids: Sequence[int],
        reports: Iterable[WorkerReport],
        *,
        shares: bool = True,
        salt: bytes = b"",
    ) -> Decision | None:
        """None: nobody can answer. ``shares``: the prompt may come from prefix caches, where it is kept under
        ``salt``."""
        standings = self._standings_of(list(reports))
        cached = self._prefixes.cached(token_ids, salt) if shares else {}
        decision = choose(Prompt(len(token_ids), cached), standings, self._options)
        if decision is not None and log.isEnabledFor(logging.DEBUG):
            log.debug("request %s is placed: %s", request_id, decision)
        return decision

    def _standings_of(self, reports: Sequence[WorkerReport]) -> list[Standing]:
        known = self._standings.get
        new = [
            report
            for report in reports
            if (standing := known(report.address)) is None or standing.report is not report
        ]
        if new:
            self._take_in(new)
        standings = self._standings
        return [standings[report.address] for report in reports]

    def _take_in(self, reports: Sequence[WorkerReport]) -> None:
        """Each counts once in what is usual, and all are made with the same."""
        for report in reports:
            self._seen = _smoothed(self._seen, report)
        anew = list(reports)
        if any(abs(now - then) > CHANGE * then for now, then in zip(self._seen, self._usual, strict=True)):
            self._usual = self._seen
            newer = {report.address for report in reports}
            anew += [each.report for address, each in self._standings.items() if address not in newer]
        for report in anew:
            self._standings[report.address] = Standing.of(report, self._options, self._usual)

    # --- what workers tell

    def joined(self, worker: str, hello: pb.WorkerHello) -> None:
        """A worker's stream has begun."""
        self._prefixes.joined(worker, hello)

    def told(self, worker: str, events: pb.BlockEvents) -> bool:
        """False: a snapshot is wanted."""
        return self._prefixes.told(worker, events)

    def left(self, worker: str) -> None:
        """Its stream is over."""
        self._prefixes.left(worker)
        self._standings.pop(worker, None)

    def tick(self) -> None:
        """Time goes by."""
        self._prefixes.index.sweep(SWEEP_BLOCKS)


def _smoothed(usual: Speeds, report: WorkerReport) -> Speeds:
    first = FIRST_SPEEDS
    row_s = report.step_row_s if report.step_base_s else 0.0
    return Speeds(
        _mean(usual.tokens_per_s, report.prefill_tokens_per_s, first.tokens_per_s),
        _mean(usual.step_base_s, report.step_base_s, first.step_base_s),
        _mean(usual.step_row_s, row_s, first.step_row_s),
        _mean(usual.link_bytes_per_s, report.link_bytes_per_s, first.link_bytes_per_s),
    )


def _mean(before: float, newest: float, guess: float) -> float:
    """``newest`` of 0.0: not measured. What was only guessed before counts for nothing once it is: a worker
    without a measurement would look slower, or faster, than all others for long."""
    if not newest:
        return before
    return newest if before == guess else before + WEIGHT * (newest - before)
