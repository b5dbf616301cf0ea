"""The workers of one ring: their membership, their reports, and the placement of requests on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.core.role import may_decode, may_prefill
from baton.request.limits import ModelInfo
from baton.router.discovery.endpoint import Discovery, Endpoint
from baton.router.fleet.compatibility import pairings, unpaired
from baton.router.fleet.members import Members
from baton.router.fleet.unlinked import LinkRefusal, UnlinkedPairs
from baton.router.fleet.worker_client import WorkerClient
from baton.router.placement import PlacementOptions
from baton.router.placement.placer import Placer
from baton.telemetry.ring import WorkerView
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)


class Fleet:
    """The workers that discovery knows, and former ones that still finish their requests."""

    def __init__(
        self,
        members: Members,
        discovery: Discovery,
        model_name: str,
        placement: PlacementOptions,
        max_staleness_s: float,
    ) -> None:
        """``max_staleness_s``: seconds without a confirmed discovery after which the fleet is ``stale``."""
        self.members = members
        self.discovery = discovery
        self.placement = placement
        self.placer = Placer(placement)
        self._model_name = model_name
        self._max_staleness_s = max_staleness_s
        self.model: ModelInfo | None = None
        """The narrowest limits of all ready workers: a request must fit wherever it is placed. Unchanged
        while no worker is ready."""
        self._peers_changed = False
        """Whether the decode workers changed since prefill workers were told of them."""
        self._at: dict[str, WorkerClient] = {}
        """The worker at each address whose block events count: a new process may reuse a former one's
        address."""
        self._unlinked = UnlinkedPairs()
        self.members.set(discovery.known)

    @property
    def workers(self) -> list[WorkerClient]:
        """The workers that discovery knows, then former ones that still finish their requests."""
        return self.members.workers

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints that discovery knows."""
        self.members.set(endpoints)
        self._peers_changed = True

    def tick(self, elapsed: float) -> None:
        """Advance the timers by ``elapsed`` seconds."""
        self.members.tick(elapsed)
        if self._peers_changed:
            self._peers_changed = False
            self._name_peers()

    # --- the state of the workers

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
        return any(worker.usable and may_decode(worker.role) for worker in self.workers)

    @property
    def stale(self) -> bool:
        return self.discovery.staleness_s > self._max_staleness_s

    def loads(self) -> list[WorkerView]:
        """Return every worker with its last report; of two at one address, the one that discovery knows."""
        by_address = {worker.address: worker for worker in reversed(self.workers)}
        return [self._view_of(worker) for worker in by_address.values()]

    def _view_of(self, worker: WorkerClient) -> WorkerView:
        hello, load = worker.hello or pb.WorkerHello(), worker.load
        return WorkerView(
            address=worker.address,
            role=worker.role if worker.ready else "unknown",
            ready=worker.ready,
            draining=worker.draining,
            running=load.running,
            waiting=load.waiting,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            blocks_held=load.blocks_held,
            open_handoffs=load.open_handoffs,
            ejected=self.members.ejected(worker),
            refused=worker.refused,
            prompt_tokens=load.prompt_tokens,
            generated_tokens=load.generated_tokens,
            drained=worker.left_drained,
            waiting_tokens=load.waiting_prefill_tokens,
            blocks_reserved=load.blocks_reserved,
            seats=hello.max_running,
            block_bytes=hello.block_size * hello.kv_bytes_per_token,
            kv_groups=tuple(map(_group_told, hello.kv_groups)),
            blocks_findable=self.placer.findable(worker.address) if worker.ready else (),
            link_bytes_per_s=load.handoff_bytes_per_s,
        )

    # --- pairs that cannot be linked

    def never_link(self, prefill: WorkerClient, decode: WorkerClient, refusal: LinkRefusal) -> bool:
        """Pair these two workers no more, for as long as both processes live. False: one of them is gone, so
        that nobody knows which process was meant."""
        if prefill.hello is None or decode.hello is None:
            return False
        if self._unlinked.add(prefill.hello.incarnation, decode.hello.incarnation, refusal):
            log.warning(
                "prefill %s and decode %s are not paired any more, as long as both run: %s",
                prefill.address,
                decode.address,
                refusal.reason,
            )
        self._part_unlinked()
        return True

    def _part_unlinked(self) -> None:
        apart: dict[WorkerClient, set[str]] = {}
        for prefill, decode, _ in self._unlinked.among(self.workers):
            apart.setdefault(decode, set()).add(prefill.address)
        for worker in self.workers:
            worker.note_unlinked(frozenset(apart.get(worker, ())))

    def unlinked(self) -> list[LinkRefusal]:
        """Return why workers that are ready are not paired, an entry for each pair."""
        return [refusal for _, _, refusal in self._unlinked.among(self.workers)]

    # --- events of workers

    def joined(self, worker: WorkerClient) -> None:
        """Add a worker whose stream has begun."""
        assert worker.hello is not None
        self._at[worker.address] = worker
        self.placer.joined(worker.address, worker.hello)
        self._part_unlinked()

    def changed(self) -> None:
        """Note that a worker has become ready, drains, or is lost."""
        self.model = self._view() or self.model
        self._peers_changed = True

    def record_blocks(self, worker: WorkerClient, events: pb.BlockEvents) -> bool:
        """Take in a worker's block events. False: an event was missed."""
        return self._at.get(worker.address) is not worker or self.placer.told(worker.address, events)

    def left(self, worker: WorkerClient) -> None:
        """Remove a worker whose stream has ended."""
        if self._at.get(worker.address) is worker:
            del self._at[worker.address]
            self.placer.left(worker.address)
        self.changed()

    def warn_of_lonely(self) -> None:
        for lonely in unpaired(self.workers):
            log.warning("prefill worker %s fits no decode worker: it gets no requests", lonely.address)

    def _name_peers(self) -> None:
        """Tell prefill workers of the decode workers, so that they link before the first request needs it.
        Done once for all changes between two ticks: hundreds of workers may come at once."""
        for like, takers in pairings(self.workers):
            peers = pb.DecodePeers(
                peers=(
                    pb.DecodePeer(handoff_address=w.hello.handoff_address, incarnation=w.hello.incarnation)
                    for w in takers
                    if w.hello is not None and w.usable
                )
            )
            for worker in like:
                if may_prefill(worker.role):
                    worker.name_peers(peers)


def _group_told(group: pb.KVGroup) -> str:
    """Return what a KV group keeps, as a person reads it: ``full``, ``window 4096``, ``chunk 8192``, …"""
    kind = pb.KVGroupKind.Name(group.kind).removeprefix("KV_GROUP_KIND_").lower()
    if group.kind != pb.KV_GROUP_KIND_WINDOW:
        return kind
    return f"{'chunk' if group.chunked else kind} {group.window}"
