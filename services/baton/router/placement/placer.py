"""The placement of prompts on workers, with the state that it keeps from one request to the next."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.router.placement import Decision, PlacementOptions, Prompt, WorkerReport, choose
from baton.router.placement.estimate import Estimates
from baton.router.placement.prefixes import Prefixes
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SWEEP_BLOCKS = 5000
"""Blocks that each tick clears of workers that are gone, which takes under 2 ms."""


class Placer:
    """Asks the placement policy, and keeps its inputs: the estimates and the prefix index."""

    def __init__(self, options: PlacementOptions) -> None:
        self._options = options
        self._prefixes = Prefixes()
        self._estimates = Estimates(options)

    def place(
        self,
        request_id: str,
        token_ids: Sequence[int],
        reports: Sequence[WorkerReport],
        *,
        shares: bool = True,
        salt: bytes = b"",
    ) -> Decision | None:
        """Place a request; None if no worker can answer it. ``shares``: the prompt may come from prefix
        caches, where it is kept under ``salt``."""
        estimates = self._estimates.of(reports)
        cached = self._prefixes.cached(token_ids, salt) if shares else {}
        decision = choose(Prompt(len(token_ids), cached), estimates, self._options)
        if decision is not None and log.isEnabledFor(logging.DEBUG):
            log.debug("request %s is placed: %s", request_id, decision)
        return decision

    def findable(self, worker: str) -> tuple[int, ...]:
        """Return the number of blocks that the worker's prefix cache can find, for each of its KV groups;
        empty for one that tells of none."""
        return self._prefixes.findable(worker)

    # --- events of workers

    def joined(self, worker: str, hello: pb.WorkerHello) -> None:
        """Add a worker whose stream has begun."""
        self._prefixes.joined(worker, hello)

    def told(self, worker: str, events: pb.BlockEvents) -> bool:
        """Take in a worker's block events. False: a snapshot is wanted."""
        return self._prefixes.told(worker, events)

    def left(self, worker: str) -> None:
        """Forget a worker whose stream has ended."""
        self._prefixes.left(worker)
        self._estimates.forget(worker)

    def tick(self) -> None:
        """Sweep the prefix index; called regularly."""
        self._prefixes.index.sweep(SWEEP_BLOCKS)
