"""From a prompt and the workers at hand to who answers it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.router.placement import Decision, PlacementOptions, Prompt, WorkerReport, choose
from baton.router.prefixes import Prefixes
from baton.router.standings import Standings
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SWEEP_BLOCKS = 5000
"""Traces of workers that are gone to be cleared at each tick: under 2 ms."""


class Placer:
    """Asks the policy, and keeps what it would work out again and again."""

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options
        self._prefixes = Prefixes()
        self._standings = Standings(options)

    def place(
        self,
        request_id: str,
        token_ids: Sequence[int],
        reports: Sequence[WorkerReport],
        *,
        shares: bool = True,
        salt: bytes = b"",
    ) -> Decision | None:
        """None: nobody can answer. ``shares``: the prompt may come from prefix caches, where it is kept under
        ``salt``."""
        standings = self._standings.of(reports)
        cached = self._prefixes.cached(token_ids, salt) if shares else {}
        decision = choose(Prompt(len(token_ids), cached), standings, self._options)
        if decision is not None and log.isEnabledFor(logging.DEBUG):
            log.debug("request %s is placed: %s", request_id, decision)
        return decision

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
        self._standings.forget(worker)

    def tick(self) -> None:
        """Time goes by."""
        self._prefixes.index.sweep(SWEEP_BLOCKS)
