"""The workers of one ring: who they are, what they say of themselves, and whom a request goes to."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from baton.router.answers import Group
from baton.router.compatibility import by_group, unpaired
from baton.router.discovery.endpoint import Discovery, Endpoint
from baton.router.members import Members
from baton.router.placement import PlacementOptions, may_prefill, takes_over
from baton.router.placer import Placer
from baton.router.traces.record import Placed
from baton.router.types import ModelInfo
from baton.router.workers import WorkerClient
from baton.telemetry.ring import WorkerView
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where an attempt goes."""

    decode: WorkerClient
    prefill: WorkerClient | None
    uncached: int
    """Tokens that are expected to be computed there."""
    placed: Placed
    """Why, for the record."""


class Fleet:
    """Those that discovery knows, and those that still finish what they have."""

    def __init__(
        self,
        members: Members,
        discovery: Discovery,
        model_name: str,
        placement: PlacementOptions,
        max_staleness_s: float,
    ) -> None:
        """``max_staleness_s``: how long ago ``discovery`` may have been confirmed, until it is ``stale``."""
        self.members = members
        self.discovery = discovery
        self.placement = placement
        self.placer = Placer(placement)
        self._model_name = model_name
        self._max_staleness_s = max_staleness_s
        self._last_view: ModelInfo | None = None
        """Of the workers, when one was last ready."""
        self._peers_changed = False
        """Since those who prefill were told of the decode workers."""
        self._at: dict[str, WorkerClient] = {}
        """Whose word on blocks counts, by address: a new process may have that of one which is gone."""
        self._expecting: set[WorkerClient] = set()
        """Those that were last said to have answers on their way to them."""
        self.members.set(discovery.known)

    @property
    def workers(self) -> list[WorkerClient]:
        """All that are known, and those that still finish what they have."""
        return self.members.workers

    def known(self, endpoints: Sequence[Endpoint]) -> None:
        """Discovery knows these from now on, and no others."""
        self.members.set(endpoints)
        self._peers_changed = True

    def tick(self, elapsed: float) -> None:
        """``elapsed`` seconds went by."""
        self.members.tick(elapsed)
        if self._peers_changed:
            self._peers_changed = False
            self._name_peers()

    # --- what they are

    @property
    def model(self) -> ModelInfo | None:
        """The most cautious view of the ready workers: a request must fit wherever it is placed. While none
        is ready, as it was before."""
        return self._last_view

    def _view(self) -> ModelInfo | None:
        hellos = [w.hello for w in self.workers if w.hello is not None]
        if not hellos:
            return None
        return ModelInfo(
            name=self._model_name,
            revision=hellos[0].revision,
            max_model_len=min(h.max_model_len for h in hellos),
            vocab_size=min(h.vocab_size for h in hellos),
            eos_token_ids=frozenset().union(*(h.eos_token_ids for h in hellos)),
            takes_priorities=all(h.takes_priorities for h in hellos),
        )

    @property
    def can_decode(self) -> bool:
        return any(worker.usable and worker.role != "prefill" for worker in self.workers)

    @property
    def stale(self) -> bool:
        return self.discovery.staleness_s > self._max_staleness_s

    def loads(self) -> list[WorkerView]:
        """Every worker, with its last report. Of two at one address, the one that is known."""
        by_address = {worker.address: worker for worker in reversed(self.workers)}
        return [
            WorkerView(
                address=worker.address,
                role=worker.role if worker.ready else "unknown",
                ready=worker.ready,
                draining=worker.draining,
                running=worker.load.running,
                waiting=worker.load.waiting,
                blocks_free=worker.load.blocks_free,
                blocks_cached=worker.load.blocks_cached,
                blocks_held=worker.load.blocks_held,
                open_handoffs=worker.load.open_handoffs,
                ejected=self.members.ejected(worker),
                refused=worker.refused,
            )
            for worker in by_address.values()
        ]

    # --- what they say

    def joined(self, worker: WorkerClient) -> None:
        """Its stream has begun."""
        assert worker.hello is not None
        self._at[worker.address] = worker
        self.placer.joined(worker.address, worker.hello)

    def changed(self) -> None:
        """A worker has become ready, drains, or is lost."""
        self._last_view = self._view() or self._last_view
        self._peers_changed = True

    def told_of_blocks(self, worker: WorkerClient, events: pb.BlockEvents) -> bool:
        """False: something was missed."""
        return self._at.get(worker.address) is not worker or self.placer.told(worker.address, events)

    def left(self, worker: WorkerClient) -> None:
        """Its stream has ended."""
        if self._at.get(worker.address) is worker:
            del self._at[worker.address]
            self.placer.left(worker.address)
        self.changed()

    def warn_of_lonely(self) -> None:
        for lonely in unpaired(self.workers):
            log.warning("prefill worker %s fits no decode worker: it gets no requests", lonely.address)

    def _name_peers(self) -> None:
        """Those who prefill link to the decode workers before the first request needs it. Once for all
        changes between two ticks: where hundreds of workers come at once, each is told of hundreds."""
        for like in by_group(self.workers).values():
            peers = pb.DecodePeers(
                peers=(
                    pb.DecodePeer(handoff_address=w.hello.handoff_address, incarnation=w.hello.incarnation)
                    for w in like
                    if w.hello is not None and takes_over(w.role) and w.usable
                )
            )
            for worker in like:
                if may_prefill(worker.role):
                    worker.name_peers(peers)

    # --- whom a request goes to

    def choose(self, group: Group, coming: Counter[WorkerClient]) -> Place | None:
        """Who is to take the next attempt, if anybody can. ``coming``: the answers that are on their way to
        each worker from those that prefill.

        An attempt that was refused or broke avoids those with which it did, as long as there are others of
        their role; an answer that was begun is written on by the same revision of the model, as long as there
        is one."""
        begun = any(answer.entry.output_ids for answer in group.going)
        foreign: set[str] = set()
        if begun:
            foreign = {w.address for w in self.workers if w.hello and w.hello.revision != group.revision}
        placed = self._place(group, coming, group.avoided | foreign)
        for_want = self.placement.disaggregation == "always"  # of another prefill worker, not by choice
        if group.avoided and (
            placed is None or (for_want and placed.prefill is None and takes_over(placed.decode.role))
        ):
            placed = self._place(group, coming, foreign)
        return self._place(group, coming) if placed is None and foreign else placed

    def _place(
        self, group: Group, coming: Counter[WorkerClient], avoided: Collection[str] = ()
    ) -> Place | None:
        """Who answers next, of those that are ready and not ``avoided``."""
        self._expect(coming)
        by_address = {worker.address: worker for worker in self.members.available(time.monotonic())}
        for address in avoided:
            by_address.pop(address, None)
        first = group.going[0]
        token_ids, delivered = group.prompt_ids, first.entry.output_ids
        shares = first.request.params.prompt_logprobs is None or bool(delivered)
        decision = self.placer.place(
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
        return Place(by_address[decode], by_address[prefill] if prefill else None, uncached, placed)

    def _expect(self, coming: Counter[WorkerClient]) -> None:
        for worker in self._expecting.difference(coming):
            worker.expect(0)
        for worker, sequences in coming.items():
            worker.expect(sequences)
        self._expecting = set(coming)
