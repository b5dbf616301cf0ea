"""The choice of the workers in the fleet that take the next attempt of a group."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from baton.core.role import takes_over
from baton.router.dispatch.answers import Group
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.worker_client import WorkerClient
from baton.router.traces.record import Placed


class AttemptWorkers(NamedTuple):
    """The workers of an attempt."""

    decode: WorkerClient
    prefill: WorkerClient | None
    uncached: int
    """Prompt tokens that these workers are expected to compute."""
    placed: Placed
    """The reasons of the choice, for the trace."""


class Placing:
    """Chooses workers for attempts."""

    def __init__(self, fleet: Fleet, under_way: Mapping[str, Group]) -> None:
        """``under_way``: a live view of the groups whose attempt is under way, by name."""
        self._fleet = fleet
        self._under_way = under_way
        self._expecting: set[WorkerClient] = set()
        """Workers that were last told that answers are on their way to them."""

    def choose(self, group: Group) -> AttemptWorkers | None:
        """Return the workers that would take the next attempt now, or None if none can.

        After a refusal or a broken handoff the attempt avoids the workers that were part of it, as long as
        there are others of their role. An answer that has tokens continues on the same revision of the model,
        as long as a worker serves that."""
        coming = self._coming()
        begun = any(answer.entry.output_ids for answer in group.going)
        foreign: set[str] = set()
        if begun:
            foreign = {
                w.address for w in self._fleet.workers if w.hello and w.hello.revision != group.revision
            }
        placed = self._place(group, coming, group.avoided | foreign)
        # Decode then computes a prompt for want of a prefill worker only, never by choice.
        for_want = self._fleet.placement.disaggregation == "always"
        if group.avoided and (
            placed is None or (for_want and placed.prefill is None and takes_over(placed.decode.role))
        ):
            placed = self._place(group, coming, foreign)
        return self._place(group, coming) if placed is None and foreign else placed

    def _coming(self) -> Counter[WorkerClient]:
        """Count the answers that are on their way to each decode worker from prefill."""
        coming: Counter[WorkerClient] = Counter()
        for group in self._under_way.values():
            if group.decode is not None and group.prefill is not None:
                coming[group.decode] += len(group.going)
        return coming

    def _place(
        self, group: Group, coming: Counter[WorkerClient], avoided: Collection[str] = ()
    ) -> AttemptWorkers | None:
        """Place the next attempt on workers that are ready and not ``avoided``; None if none can take it."""
        self._expect(coming)
        by_address = {worker.address: worker for worker in self._fleet.members.available(time.monotonic())}
        for address in avoided:
            by_address.pop(address, None)
        first = group.going[0]
        token_ids, delivered = group.prompt_ids, first.entry.output_ids
        shares = first.request.params.prompt_logprobs is None or bool(delivered)
        decision = self._fleet.placer.place(
            first.request.request_id,
            token_ids + delivered if delivered else token_ids,
            [worker.report() for worker in by_address.values()],
            shares=shares,
            salt=first.request.cache_salt,
        )
        if decision is None:
            return None
        decode, prefill = decision.choice
        uncached = decision.prompt.num_tokens - decision.chosen.cached
        placed = Placed.of(decision, lambda address: by_address[address].report())
        return AttemptWorkers(by_address[decode], by_address[prefill] if prefill else None, uncached, placed)

    def _expect(self, coming: Counter[WorkerClient]) -> None:
        for worker in self._expecting.difference(coming):
            worker.expect(0)
        for worker, sequences in coming.items():
            worker.expect(sequences)
        self._expecting = set(coming)
