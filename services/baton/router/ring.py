"""The ring of workers behind one router: placement, submission, and the tokens that come back."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field

from baton.connector.identity import sign_handle
from baton.connector.liveness import TEMPO, TICK_S, Tempo
from baton.connector.messages import Name
from baton.router.ledger import Entry
from baton.router.placement import least_loaded, may_prefill, takes_over
from baton.router.types import ModelInfo, RingError, TokenChunk, deadline_exceeded
from baton.router.workers import WorkerClient
from baton.sampling_params import SamplingParams
from baton.telemetry.ring import WorkerView
from baton.urgency import CALM, Urgency
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

WORKER_TELLS_S = 0.5
"""How long after a deadline the worker's own word on it may take: it looks every tick, and its clock began
when the request had reached it."""
MAX_LOST = 3
"""Attempts of one request whose handoff may break; a request that breaks more is given up on."""


@dataclass(slots=True)
class _Active:
    """A request under way, and the workers that know of it."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    urgency: Urgency
    decode: WorkerClient
    prefill: WorkerClient | None
    entry: Entry = field(default_factory=Entry)
    avoided: set[str] = field(default_factory=set)
    """Decode workers that prefill could not link to, or that have no room."""
    lost: int = 0
    """Attempts whose handoff broke."""
    arrived: asyncio.Queue[TokenChunk | RingError] = field(default_factory=asyncio.Queue)

    @property
    def workers(self) -> list[WorkerClient]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


class WorkerRing:
    """``baton.router.types.Ring`` over gRPC streams to workers at fixed addresses."""

    def __init__(
        self, addresses: Sequence[str], model_name: str, cluster_key: bytes, tempo: Tempo = TEMPO
    ) -> None:
        self._model_name = model_name
        self._cluster_key = cluster_key
        self._active: dict[str, _Active] = {}
        self._tasks: list[asyncio.Task[None]] = []
        router_id = secrets.token_hex(8)
        self.workers = [WorkerClient(a, router_id, self, tempo) for a in addresses]

    def start(self) -> None:
        """Dial the workers, and dial again for as long as the router lives."""
        self._tasks = [asyncio.create_task(w.run(), name=f"worker {w.address}") for w in self.workers]
        self._tasks.append(asyncio.create_task(self._run_timers(), name="timers"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_timers(self) -> None:
        """Listen for silence, for as long as the router lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for worker in self.workers:
                worker.tick(now - before)
            before = now

    @property
    def model(self) -> ModelInfo | None:
        """The most cautious view of the ready workers: a request must fit wherever it is placed."""
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
    def ready(self) -> bool:
        return self._place() is not None

    def loads(self) -> list[WorkerView]:
        """Every configured worker, with its last report."""
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
            )
            for worker in self.workers
        ]

    def _place(self, avoided: Collection[str] = ()) -> tuple[WorkerClient, WorkerClient | None] | None:
        """A decode worker and, unless it is to compute the prompt as well, a prefill worker."""
        by_address = {
            w.address: w for w in self.workers if w.ready and not w.draining and w.address not in avoided
        }
        choice = least_loaded([w.report() for w in by_address.values()])
        if choice is None:
            return None
        return by_address[choice.decode], by_address[choice.prefill] if choice.prefill else None

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, urgency: Urgency = CALM
    ) -> AsyncGenerator[TokenChunk]:
        """Run one request; see ``Ring.generate``."""
        if urgency.overdue(time.monotonic()):
            raise deadline_exceeded()
        placed = self._place()
        if placed is None:
            raise RingError(503, "no_worker", "no worker that can decode is ready")
        active = _Active(request_id, prompt_ids, params, urgency, *placed)
        self._active[request_id] = active
        try:
            self._submit(active)
            finished = False
            while not finished:
                arrived = await self._next(active)
                if isinstance(arrived, RingError):
                    raise arrived
                finished = arrived.finish_reason is not None
                yield arrived
        finally:
            del self._active[request_id]
            if not active.entry.finished:
                for worker in active.workers:
                    worker.cancel(request_id, active.entry.attempt)

    @staticmethod
    async def _next(active: _Active) -> TokenChunk | RingError:
        """What comes next, or that the deadline has passed and no worker has said so."""
        deadline = active.urgency.deadline
        if deadline is None:
            return await active.arrived.get()
        try:
            async with asyncio.timeout(deadline - time.monotonic() + WORKER_TELLS_S):
                return await active.arrived.get()
        except TimeoutError:
            return deadline_exceeded()

    def _submit(self, active: _Active) -> None:
        """Start an attempt on workers that were ready a moment ago, in the same turn of the event loop."""
        name = Name(active.request_id, active.entry.attempt)
        submit = pb.Submit(
            request_id=name.request_id,
            attempt=name.attempt,
            prompt_ids=active.prompt_ids,
            output_ids=active.entry.output_ids,
            params=active.params.to_proto(),
            urgency=active.urgency.to_proto(time.monotonic()),
        )
        prefill, decode = active.prefill, active.decode
        if prefill is None:
            decode.submit(submit)
            return
        hello = decode.hello
        assert hello is not None
        num_tokens = len(active.prompt_ids) + len(active.entry.output_ids)
        handle = sign_handle(self._cluster_key, name, hello.incarnation, num_tokens)
        submit.decode.handoff_address = hello.handoff_address
        submit.decode.incarnation = hello.incarnation
        submit.decode.handle = handle
        decode.count(0)
        prefill.submit(submit)

    def _place_again(self, active: _Active, refused_by: WorkerClient, reason: str) -> None:
        """Nothing of the attempt was begun: the next one goes to other workers, while there are any.

        Each refusal leaves one worker fewer to choose from: the one that drains, or the decode worker that
        prefill cannot link to.
        """
        self._forget_elsewhere(active, refused_by)
        if not refused_by.draining:
            active.avoided.add(active.decode.address)
        self._attempt_again(active, self._place(active.avoided), reason)

    def _go_on(self, active: _Active, failed_at: WorkerClient, reason: str) -> None:
        """The handoff of an attempt broke, and with it what was computed: the next attempt goes on from the
        tokens that the client has."""
        self._forget_elsewhere(active, failed_at)
        active.lost += 1
        placed = self._place(active.avoided) if active.lost < MAX_LOST else None
        self._attempt_again(active, placed, reason)

    def _attempt_again(
        self, active: _Active, placed: tuple[WorkerClient, WorkerClient | None] | None, reason: str
    ) -> None:
        if placed is None:
            active.entry.finished = True
            active.arrived.put_nowait(RingError(503, "worker_error", reason))
            return
        log.warning("request %s: attempt %d ended: %s", active.request_id, active.entry.attempt, reason)
        active.entry.attempt += 1
        active.decode, active.prefill = placed
        self._submit(active)

    # --- what workers say (``baton.router.workers.Watcher``)

    def busy(self, worker: WorkerClient) -> bool:
        return any(worker in active.workers for active in self._active.values())

    def on_change(self, worker: WorkerClient) -> None:
        self._name_peers()

    def _name_peers(self) -> None:
        """Those who prefill link to the decode workers before the first request needs it."""
        peers = [
            pb.DecodePeer(handoff_address=w.hello.handoff_address, incarnation=w.hello.incarnation)
            for w in self.workers
            if w.hello is not None and takes_over(w.role) and not w.draining
        ]
        for worker in self.workers:
            if may_prefill(worker.role):
                worker.name_peers(peers)

    def on_frame(self, worker: WorkerClient, frame: pb.Frame) -> None:
        for delta in frame.deltas:
            active = self._active.get(delta.request_id)
            if active is None:
                continue
            if active.entry.refused(delta):
                self._place_again(active, worker, delta.error)
                continue
            if active.entry.lost(delta):
                self._go_on(active, worker, delta.error)
                continue
            if worker is active.decode and delta.attempt == active.entry.attempt:
                active.prefill = None  # the baton has been passed: prefill's fate matters no more
            accepted = active.entry.accept(delta)
            if accepted is None:
                continue
            if isinstance(accepted, RingError):
                self._forget_elsewhere(active, worker)
            active.arrived.put_nowait(accepted)

    def _forget_elsewhere(self, active: _Active, failed_at: WorkerClient) -> None:
        for worker in active.workers:
            if worker is not failed_at:
                worker.cancel(active.request_id, active.entry.attempt)

    def on_lost(self, worker: WorkerClient) -> None:
        self._name_peers()
        if worker.drained:  # what it had to hand on is with decode
            for active in self._active.values():
                if worker is active.prefill:
                    active.prefill = None
        lost = [a for a in self._active.values() if worker in a.workers and not a.entry.finished]
        if lost or not worker.drained:
            log.warning("worker %s is lost, and %d requests with it", worker.address, len(lost))
        for active in lost:
            active.entry.finished = True
            role = "decode" if worker is active.decode else "prefill"
            self._forget_elsewhere(active, worker)
            message = f"the {role} worker answering this request was lost; please send it again"
            active.arrived.put_nowait(RingError(503, "worker_lost", message))
