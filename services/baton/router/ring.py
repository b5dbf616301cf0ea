"""The ring of workers behind one router: placement, submission, and the tokens that come back."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.connector.identity import sign_handle
from baton.connector.liveness import TEMPO, TICK_S, Tempo
from baton.connector.messages import Name
from baton.router.compatibility import by_group, unpaired
from baton.router.discovery.endpoint import Discovery, Endpoint
from baton.router.discovery.static import StaticDiscovery
from baton.router.ledger import Entry, failure
from baton.router.members import Members
from baton.router.placement import least_loaded, may_prefill, takes_over
from baton.router.types import ModelInfo, Request, RingError, TokenChunk, deadline_exceeded
from baton.router.workers import WorkerClient
from baton.telemetry.ring import WorkerView
from baton.urgency import CALM, Urgency
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

WORKER_TELLS_S = 0.5
"""How long after a deadline the worker's own word on it may take: it looks every tick, and its clock began
when the request had reached it."""
MAX_LOST = 3
"""Attempts of one request whose handoff may break; a request that breaks more is given up on."""


@dataclass(slots=True, eq=False)
class _Answer:
    """One answer under way: a request of its own to the workers, once it has its first token."""

    request: Request
    group: _Group
    entry: Entry = field(default_factory=Entry)
    arrived: asyncio.Queue[TokenChunk | RingError] = field(default_factory=asyncio.Queue)
    closed: bool = False
    """Nobody wants more of it."""


@dataclass(slots=True, eq=False)
class _Group:
    """The answers to one prompt, and the workers that know of them.

    Workers compute the prompt once, under the name of the first answer that is not over (``name``), and hand
    it on once. What ends that, ends all of them; from then on each goes its own way.
    """

    prompt_ids: list[int]
    urgency: Urgency
    answers: list[_Answer] = field(default_factory=list)
    attempt: int = -1
    """-1: not submitted yet."""
    name: str = ""
    decode: WorkerClient | None = None
    prefill: WorkerClient | None = None
    parted: bool = False
    """Each answer is a request of its own by now: tokens of the attempt have come from decode."""
    avoided: set[str] = field(default_factory=set)
    """Decode workers that prefill could not link to, or that have no room."""
    lost: int = 0
    """Attempts whose handoff broke."""

    @property
    def workers(self) -> list[WorkerClient]:
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    @property
    def going(self) -> list[_Answer]:
        """Those that are wanted and not over."""
        return [answer for answer in self.answers if not answer.closed and not answer.entry.finished]


class WorkerRing:
    """``baton.router.types.Ring`` over gRPC streams to the workers that discovery knows."""

    def __init__(
        self,
        discovery: Discovery | Sequence[str],
        model_name: str,
        cluster_key: bytes,
        tempo: Tempo = TEMPO,
        max_staleness_s: float = math.inf,
    ) -> None:
        """``discovery``: how the workers are known, or their addresses. The ring is not ready when that was
        not confirmed for longer than ``max_staleness_s``."""
        self._model_name = model_name
        self._cluster_key = cluster_key
        self._max_staleness_s = max_staleness_s
        self._answers: dict[str, _Answer] = {}
        """Those under way, by request id."""
        self._groups: dict[str, _Group] = {}
        """Those whose attempt is under way as one, by name."""
        self._tasks: list[asyncio.Task[None]] = []
        self.discovery = StaticDiscovery(discovery) if isinstance(discovery, Sequence) else discovery
        router_id = secrets.token_hex(8)
        self.members = Members(lambda address: WorkerClient(address, router_id, self, tempo, self.members))
        self.members.set(self.discovery.known)

    @property
    def workers(self) -> list[WorkerClient]:
        """All that are known, and those that still finish what they have."""
        return self.members.workers

    def start(self) -> None:
        """Dial the workers, and dial again for as long as the router lives; likewise those that come."""
        self.members.start()
        self._tasks = [
            asyncio.create_task(self._run_timers(), name="timers"),
            asyncio.create_task(self.discovery.run(self._on_known), name="discovery"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.members.close()

    def _on_known(self, endpoints: Sequence[Endpoint]) -> None:
        self.members.set(endpoints)
        self._name_peers()

    async def _run_timers(self) -> None:
        """Listen for silence, for as long as the router lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.members.tick(now - before)
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
        return self._place() is not None and not self.stale

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
            )
            for worker in by_address.values()
        ]

    def _place(self, avoided: Collection[str] = ()) -> tuple[WorkerClient, WorkerClient | None] | None:
        """A decode worker and, unless it is to compute the prompt as well, a prefill worker."""
        choices = []
        for like in by_group(self.members.available(time.monotonic())).values():
            by_address = {w.address: w for w in like if w.address not in avoided}
            choice = least_loaded([w.report() for w in by_address.values()])
            if choice is not None:
                prefill = by_address[choice.prefill] if choice.prefill else None
                choices.append((by_address[choice.decode], prefill))
        # Groups share the load while a new release is rolled out; one that lacks prefill workers comes last.
        return min(choices, key=_cost, default=None)

    @contextmanager
    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request], urgency: Urgency = CALM
    ) -> Iterator[Sequence[AsyncGenerator[TokenChunk]]]:
        """Answer one prompt, several times; see ``Ring.generate``."""
        group = _Group(prompt_ids, urgency)
        group.answers = [_Answer(request, group) for request in requests]
        try:
            yield [self._chunks(answer) for answer in group.answers]
        finally:
            for answer in group.answers:
                self._close(answer)

    async def _chunks(self, answer: _Answer) -> AsyncGenerator[TokenChunk]:
        if answer.group.attempt < 0:
            self._start(answer.group)
        try:
            finished = False
            while not finished:
                arrived = await self._next(answer)
                if isinstance(arrived, RingError):
                    raise arrived
                finished = arrived.finish_reason is not None
                yield arrived
        finally:
            self._close(answer)

    async def _next(self, answer: _Answer) -> TokenChunk | RingError:
        """What comes next. If the deadline has passed and no worker says so, all answers end here."""
        deadline = answer.group.urgency.deadline
        if deadline is None:
            return await answer.arrived.get()
        try:
            async with asyncio.timeout(deadline - time.monotonic() + WORKER_TELLS_S):
                return await answer.arrived.get()
        except TimeoutError:
            self._end(answer.group, deadline_exceeded())
            return await answer.arrived.get()

    def _start(self, group: _Group) -> None:
        if group.urgency.overdue(time.monotonic()):
            raise deadline_exceeded()
        placed = self._place()
        if placed is None:
            raise RingError(503, "no_worker", "no worker that can decode is ready")
        self._answers |= {answer.request.request_id: answer for answer in group.answers}
        self._submit(group, *placed)

    def _close(self, answer: _Answer) -> None:
        """Nobody wants more of this answer. Workers hear of it, as soon as it is no others' affair too."""
        if answer.closed:
            return
        answer.closed = True
        group = answer.group
        self._answers.pop(answer.request.request_id, None)
        if group.parted:
            if not answer.entry.finished:
                self._cancel(group, [answer])
        elif group.attempt >= 0 and not group.going:
            if not all(each.entry.finished for each in group.answers):
                self._cancel(group, group.answers)
            self._groups.pop(group.name, None)

    @staticmethod
    def _cancel(group: _Group, answers: Sequence[_Answer], but: WorkerClient | None = None) -> None:
        """End answers on all workers of the group but one. While these work for all answers at once, only all
        can be ended: the name of the group goes first, and the others may have parted by now."""
        names = [answer.request.request_id for answer in answers]
        name = names[0] if group.parted else group.name
        forks = [other for other in names if other != name]
        for worker in group.workers:
            if worker is not but:
                worker.cancel(name, group.attempt, forks)

    def _submit(self, group: _Group, decode: WorkerClient, prefill: WorkerClient | None) -> None:
        """Start an attempt on workers that were ready a moment ago, in the same turn of the event loop."""
        group.decode, group.prefill = decode, prefill
        group.attempt += 1
        first, *others = group.going
        group.name = first.request.request_id
        self._groups[group.name] = group
        for answer in group.answers:
            answer.entry.attempt = group.attempt
        submit = pb.Submit(
            request_id=group.name,
            attempt=group.attempt,
            prompt_ids=group.prompt_ids,
            output_ids=first.entry.output_ids,
            params=first.request.params.to_proto(),
            urgency=group.urgency.to_proto(time.monotonic()),
            forks=[
                pb.Fork(
                    request_id=answer.request.request_id,
                    seed=answer.request.params.seed,
                    output_ids=answer.entry.output_ids,
                )
                for answer in others
            ],
        )
        if prefill is None:
            decode.submit(submit)
            return
        self._aim(submit, decode)
        decode.count(0)
        prefill.submit(submit)

    def _aim(self, submit: pb.Submit, decode: WorkerClient) -> None:
        """Name the decode worker that the request is to be handed on to."""
        hello = decode.hello
        assert hello is not None
        # Of an answer with siblings the first token is drawn anew, or given back, by who computes the prompt.
        num_tokens = len(submit.prompt_ids) + (0 if submit.forks else len(submit.output_ids))
        name = Name(submit.request_id, submit.attempt)
        submit.decode.handoff_address = hello.handoff_address
        submit.decode.incarnation = hello.incarnation
        submit.decode.handle = sign_handle(self._cluster_key, name, hello.incarnation, num_tokens)

    def _place_again(self, group: _Group, refused_by: WorkerClient, reason: str) -> None:
        """Nothing of the attempt was begun: the next one goes to other workers, while there are any.

        Each refusal leaves one worker fewer to choose from: the one that drains, or the decode worker that
        prefill cannot link to.
        """
        if not refused_by.draining and group.decode is not None:
            group.avoided.add(group.decode.address)
        self._attempt_again(group, refused_by, self._place(group.avoided), reason)

    def _go_on(self, group: _Group, failed_at: WorkerClient, reason: str) -> None:
        """The handoff of an attempt broke, and with it what was computed: the next attempt goes on from the
        tokens that the client has."""
        group.lost += 1
        placed = self._place(group.avoided) if group.lost < MAX_LOST else None
        self._attempt_again(group, failed_at, placed, reason)

    def _attempt_again(
        self,
        group: _Group,
        failed_at: WorkerClient,
        placed: tuple[WorkerClient, WorkerClient | None] | None,
        reason: str,
    ) -> None:
        self._cancel(group, group.answers, but=failed_at)
        del self._groups[group.name]
        if placed is None or not group.going:
            self._fail(group.going, RingError(503, "worker_error", reason))
            return
        log.warning("request %s: attempt %d ended: %s", group.name, group.attempt, reason)
        self._submit(group, *placed)

    def _end(self, group: _Group, error: RingError, but: WorkerClient | None = None) -> None:
        """All answers end with ``error``, on all workers but one, which knows."""
        self._cancel(group, group.answers, but=but)
        self._groups.pop(group.name, None)
        self._fail(group.going, error)

    @staticmethod
    def _fail(answers: Sequence[_Answer], error: RingError) -> None:
        for answer in answers:
            answer.entry.finished = True
            answer.arrived.put_nowait(error)

    # --- what workers say (``baton.router.workers.Watcher``)

    def busy(self, worker: WorkerClient) -> bool:
        return any(worker in answer.group.workers for answer in self._answers.values())

    def on_change(self, worker: WorkerClient) -> None:
        self._name_peers()
        for lonely in unpaired(self.workers):
            log.warning("prefill worker %s fits no decode worker: it gets no requests", lonely.address)

    def _name_peers(self) -> None:
        """Those who prefill link to the decode workers before the first request needs it."""
        for like in by_group(self.workers).values():
            peers = [
                pb.DecodePeer(handoff_address=w.hello.handoff_address, incarnation=w.hello.incarnation)
                for w in like
                if w.hello is not None and takes_over(w.role) and w.usable
            ]
            for worker in like:
                if may_prefill(worker.role):
                    worker.name_peers(peers)

    def on_frame(self, worker: WorkerClient, frame: pb.Frame) -> None:
        for delta in frame.deltas:
            group = self._groups.get(delta.request_id)
            if group is not None and delta.attempt == group.attempt and _failed(delta):
                self._take_failure(group, worker, delta)
                continue
            answer = self._answers.get(delta.request_id)
            if answer is not None:
                self._take(answer, worker, delta)

    def _take_failure(self, group: _Group, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        """An attempt has failed that is under way as one, be the answer over that gave it its name."""
        if delta.refused:
            self._place_again(group, worker, delta.error)
        elif delta.lost:
            self._go_on(group, worker, delta.error)
        else:
            self._end(group, failure(delta), but=worker)

    def _take(self, answer: _Answer, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        group = answer.group
        if worker is group.decode and delta.attempt == group.attempt and not _failed(delta):
            self._part(group)
        accepted = answer.entry.accept(delta)
        if accepted is None:
            return
        answer.arrived.put_nowait(accepted)
        if not isinstance(accepted, RingError):
            return
        if group.parted:
            self._cancel(group, [answer], but=worker)
        else:
            self._end(group, accepted, but=worker)

    def _part(self, group: _Group) -> None:
        """The baton has been passed: prefill's fate matters no more, and each answer goes its own way."""
        if group.parted:
            return
        group.parted, group.prefill = True, None
        self._groups.pop(group.name, None)
        for answer in group.answers:
            if answer.closed and not answer.entry.finished:
                self._cancel(group, [answer])

    def on_lost(self, worker: WorkerClient) -> None:
        self._name_peers()
        groups = {id(answer.group): answer.group for answer in self._answers.values()}.values()
        if worker.drained:  # what it had to hand on is with decode
            for group in groups:
                if worker is group.prefill:
                    group.prefill = None
        broken = [group for group in groups if worker in group.workers and group.going]
        if broken or not worker.drained:
            count = sum(len(group.going) for group in broken)
            log.warning("worker %s is lost, and %d requests with it", worker.address, count)
        for group in broken:
            role = "decode" if worker is group.decode else "prefill"
            message = f"the {role} worker answering this request was lost; please send it again"
            self._end(group, RingError(503, "worker_lost", message), but=worker)


def _cost(pair: tuple[WorkerClient, WorkerClient | None]) -> tuple[bool, int, float]:
    """Of the best pair of a group: what the groups are compared by."""
    decode, prefill = pair
    report = decode.report()
    return prefill is None and decode.role == "decode", report.sequences, report.last_given_s


def _failed(delta: pb.TokenDelta) -> bool:
    return delta.finish_reason == inference_pb2.FINISH_REASON_ERROR
