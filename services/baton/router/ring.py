"""The ring of workers behind one router: placement, submission, and the tokens that come back."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from baton.connector.identity import sign_handle
from baton.connector.liveness import TEMPO, TICK_S, Tempo
from baton.connector.messages import Name
from baton.router.ledger import Entry, failure
from baton.router.placement import PlacementOptions, may_prefill, takes_over
from baton.router.placer import Placer
from baton.router.types import ModelInfo, Request, RingError, TokenChunk, deadline_exceeded
from baton.router.waiting import FullError, WaitingRoom
from baton.router.workers import WorkerClient
from baton.telemetry.ring import WorkerView
from baton.urgency import CALM, Urgency
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

WORKER_TELLS_S = 0.5
"""How long after a deadline the worker's own word on it may take: it looks every tick, and its clock began
when the request had reached it."""
QUEUE_SIZE = 4096
"""Requests that may wait for a worker."""
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
    begun: bool = False
    """Somebody wants it."""
    search: asyncio.Task[None] | None = None
    """For workers."""
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


class Place(NamedTuple):
    """Where an attempt goes."""

    decode: WorkerClient
    prefill: WorkerClient | None
    uncached: int
    """Tokens that are expected to be computed there."""


class WorkerRing:
    """``baton.router.types.Ring`` over gRPC streams to workers at fixed addresses."""

    def __init__(
        self,
        addresses: Sequence[str],
        model_name: str,
        cluster_key: bytes,
        tempo: Tempo = TEMPO,
        *,
        placement: PlacementOptions | None = None,
        queue_timeout: float = 10.0,
    ) -> None:
        self._model_name = model_name
        self._cluster_key = cluster_key
        self._placement = placement or PlacementOptions()
        self._placer = Placer(self._placement)
        self._queue_timeout = queue_timeout
        self._waiting = WaitingRoom(QUEUE_SIZE)
        self._searches: set[asyncio.Task[None]] = set()
        self._answers: dict[str, _Answer] = {}
        """Those under way, by request id."""
        self._groups: dict[str, _Group] = {}
        """Those whose attempt is under way as one, by name."""
        self._tasks: list[asyncio.Task[None]] = []
        router_id = secrets.token_hex(8)
        self.workers = [WorkerClient(a, router_id, self, tempo) for a in addresses]

    def start(self) -> None:
        """Dial the workers, and dial again for as long as the router lives."""
        self._tasks = [asyncio.create_task(w.run(), name=f"worker {w.address}") for w in self.workers]
        self._tasks.append(asyncio.create_task(self._run_timers(), name="timers"))

    async def close(self) -> None:
        tasks = [*self._tasks, *self._searches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_timers(self) -> None:
        """Listen for silence, for as long as the router lives."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for worker in self.workers:
                worker.tick(now - before)
            self._placer.tick()
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
        return any(w.ready and not w.draining and w.role != "prefill" for w in self.workers)

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

    def _place(self, group: _Group) -> Place | None:
        """Who answers next, of those that are ready and that the group does not avoid."""
        coming: Counter[WorkerClient] = Counter()
        for other in self._groups.values():
            if other.decode is not None and other.prefill is not None:
                coming[other.decode] += len(other.going)
        by_address = {w.address: w for w in self.workers if w.address not in group.avoided}
        for worker in by_address.values():
            worker.expect(coming[worker])
        first = group.going[0]
        token_ids, delivered = group.prompt_ids, first.entry.output_ids
        shares = first.request.params.prompt_logprobs is None or bool(delivered)
        decision = self._placer.place(
            first.request.request_id,
            token_ids + delivered if delivered else token_ids,
            [worker.report() for worker in by_address.values()],
            shares=shares,
        )
        if decision is None:
            return None
        decode, prefill = decision.choice
        uncached = decision.prompt.num_tokens - decision.chosen.cached
        return Place(by_address[decode], by_address[prefill] if prefill else None, uncached)

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
        if not answer.group.begun:
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
        group.begun = True
        self._answers |= {answer.request.request_id: answer for answer in group.answers}
        self._seek(group)

    def _seek(self, group: _Group) -> None:
        """Begin an attempt: now, if there is somebody to take it and nobody waits, otherwise when there
        is."""
        if len(self._waiting) or not self._begin(group):
            group.search = asyncio.create_task(self._search(group))
            self._searches.add(group.search)
            group.search.add_done_callback(self._searches.discard)

    async def _search(self, group: _Group) -> None:
        try:
            until = time.monotonic() + self._queue_timeout
            turn = (group.urgency.priority, group.urgency.since)
            await self._waiting.wait(partial(self._begin, group), until, turn)
        except TimeoutError:
            after = f", after {self._queue_timeout:g} s" if self._queue_timeout else ""
            self._fail(group.going, self._nobody(after))
        except FullError:
            message = "too many requests wait for a worker already"
            self._fail(group.going, RingError(503, "no_worker", message))
        except RingError as error:
            self._fail(group.going, error)
        finally:
            group.search = None

    def _begin(self, group: _Group) -> bool:
        """Begin an attempt, if it can be placed now. Raises RingError if it is not to wait either."""
        placed = self._place(group)
        if placed is not None:
            self._submit(group, placed)
            return True
        mode = self._placement.no_prefill if self.ready else self._placement.no_decode
        if mode == "fail":
            raise self._nobody()
        return False

    def _nobody(self, after: str = "") -> RingError:
        missing = "prefill worker" if self.ready else "worker that can decode"
        return RingError(503, "no_worker", f"no {missing} is ready{after}")

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
        if group.search is not None and not group.going:
            group.search.cancel()

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

    def _submit(self, group: _Group, place: Place) -> None:
        """Start an attempt on workers that were ready a moment ago, in the same turn of the event loop."""
        decode, prefill = group.decode, group.prefill = place.decode, place.prefill
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
            decode.submit(submit, place.uncached)
            return
        self._aim(submit, decode)
        decode.touch()
        prefill.submit(submit, place.uncached)

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
        self._attempt_again(group, refused_by, reason)

    def _go_on(self, group: _Group, failed_at: WorkerClient, reason: str) -> None:
        """The handoff of an attempt broke, and with it what was computed: the next attempt goes on from the
        tokens that the client has."""
        group.lost += 1
        self._attempt_again(group, failed_at, reason)

    def _attempt_again(self, group: _Group, failed_at: WorkerClient, reason: str) -> None:
        self._cancel(group, group.answers, but=failed_at)
        del self._groups[group.name]
        placed = self._place(group) if group.going and group.lost < MAX_LOST else None
        if placed is None:
            self._fail(group.going, RingError(503, "worker_error", reason))
            return
        log.warning("request %s: attempt %d ended: %s", group.name, group.attempt, reason)
        self._submit(group, placed)

    def _end(self, group: _Group, error: RingError, but: WorkerClient | None = None) -> None:
        """All answers end with ``error``, on all workers but one, which knows."""
        if group.search is not None:
            group.search.cancel()
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

    def on_ready(self, worker: WorkerClient) -> None:
        assert worker.hello is not None
        self._placer.joined(worker.address, worker.hello)

    def on_change(self, worker: WorkerClient) -> None:
        self._name_peers()
        self._waiting.changed()

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

    def on_blocks(self, worker: WorkerClient, events: pb.BlockEvents) -> bool:
        return self._placer.told(worker.address, events)

    def on_lost(self, worker: WorkerClient) -> None:
        self._placer.left(worker.address)
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


def _failed(delta: pb.TokenDelta) -> bool:
    return delta.finish_reason == inference_pb2.FINISH_REASON_ERROR
