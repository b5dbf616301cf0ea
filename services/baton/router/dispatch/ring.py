"""The ring of workers behind one router: what clients ask of it, and the tokens that come back.

``fleet`` knows the workers, ``attempts`` begins and retries answers, and ``departures`` handles the answers
of workers that leave.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from baton.core.attempt_failure import AttemptFailure, failure_from_proto
from baton.core.priority import NO_PRIORITY, Priority
from baton.greeting.cluster_key import ClusterKeys
from baton.net.channels import Dialer
from baton.net.heartbeat import TEMPO, Tempo, ticks
from baton.router.discovery.endpoint import Discovery, Endpoint
from baton.router.discovery.static import StaticDiscovery
from baton.router.dispatch.answers import Answer, Group
from baton.router.dispatch.attempts import Attempts
from baton.router.dispatch.departures import Departures
from baton.router.dispatch.ledger import failure
from baton.router.dispatch.retries import Retries, RetryPolicy
from baton.router.dispatch.types import ModelInfo, Request, RingError, TokenChunk, deadline_exceeded
from baton.router.fleet.expected import ExpectedModel
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.members import Members
from baton.router.fleet.unlinked import LinkRefusal
from baton.router.fleet.worker_client import WorkerClient
from baton.router.placement import PlacementOptions
from baton.router.pulse.beats import Beats
from baton.telemetry.pairs import HandoffTally, WorkerPair
from baton.telemetry.resumes import ResumeMetrics
from baton.telemetry.supervision import Supervision
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb

WORKER_TELLS_S = 0.5
"""The time after a deadline that the worker has to report it, in seconds: the worker checks deadlines every
tick, and its clock began when the request reached it."""


class WorkerRing:
    """``baton.router.dispatch.types.Ring`` over gRPC streams to the workers that discovery knows."""

    def __init__(
        self,
        discovery: Discovery | Sequence[str],
        model_name: str,
        keys: ClusterKeys,
        tempo: Tempo = TEMPO,
        retries: Retries | None = None,
        metrics: ResumeMetrics | None = None,
        placement: PlacementOptions | None = None,
        max_staleness_s: float = math.inf,
        dialer: Dialer | None = None,
        tasks: Supervision | None = None,
        expected: ExpectedModel | None = None,
    ) -> None:
        """``discovery``: the source of the workers' addresses, or the addresses. The ring is not ready when
        discovery was not confirmed for longer than ``max_staleness_s``. ``retries``, ``metrics`` and
        ``placement``: None for the default policy, for metrics that are not exposed, and for the default
        options. ``dialer``: None for plain connections. ``tasks``: the supervision of the tasks that run for
        as long as the router lives. ``expected``: the model that workers must serve; None: any."""
        router_id = secrets.token_hex(8)
        self._supervision = tasks or Supervision()
        dialer = dialer or Dialer()
        self.beats = Beats(router_id, dialer.another())
        """The heartbeats that workers get from this router while the event loop is busy."""
        members = Members(
            lambda address: WorkerClient(
                address, router_id, self, tempo, members, dialer, keys, self.beats, expected
            ),
            tasks=self._supervision,
        )
        if isinstance(discovery, Sequence):
            discovery = StaticDiscovery(discovery)
        self.fleet = Fleet(members, discovery, model_name, placement or PlacementOptions(), max_staleness_s)
        self.attempts = Attempts(
            self.fleet,
            retries or Retries(RetryPolicy()),
            metrics or ResumeMetrics(CollectorRegistry()),
        )
        self.handoffs = HandoffTally()
        """The handoffs that workers have told this router of."""
        self._departures = Departures(self.fleet, self.attempts)
        self._answers: dict[str, Answer] = {}
        """The answers under way, by request id."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Dial all workers, now and when they are discovered, and redial them for as long as the router
        lives."""
        self.fleet.members.start()
        self._tasks = [
            self._supervision.start("timers", self._run_timers),
            self._supervision.start("discovery", lambda: self.fleet.discovery.run(self._on_known)),
        ]

    async def close(self) -> None:
        tasks = [*self._tasks, *self.attempts.searches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fleet.members.close()

    def _on_known(self, endpoints: Sequence[Endpoint]) -> None:
        self.fleet.set_endpoints(endpoints)
        self.attempts.waiting.changed()

    async def _run_timers(self) -> None:
        """Detect silent workers, and move answers off draining ones, for as long as the router lives."""
        async for _, elapsed in ticks():
            try:
                self._tick(elapsed)
            except Exception as error:  # noqa: BLE001 - without heartbeats workers take the router for lost
                self._supervision.failed("timers", error)

    def _tick(self, elapsed: float) -> None:
        self.fleet.tick(elapsed)
        for worker in self.fleet.workers:
            if worker.ready and worker.draining:
                self._departures.move_from(worker, self._groups())
        self.fleet.placer.tick()
        self.attempts.waiting.changed()  # an ejection may have ended, which no event tells

    # --- the state of the workers (``baton.router.dispatch.types.Ring``)

    @property
    def model(self) -> ModelInfo | None:
        return self.fleet.model

    @property
    def ready(self) -> bool:
        return self.fleet.can_decode and not self.stale

    @property
    def stale(self) -> bool:
        return self.fleet.stale

    def unlinked_pairs(self) -> Counter[str]:
        return Counter(refusal.field for refusal in self.fleet.unlinked())

    # --- answers

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._answers

    def open_handoffs(self) -> Counter[WorkerPair]:
        """Return the number of requests by the pair of workers that they were given to, as long as decode has
        not taken them over."""
        return Counter(
            WorkerPair(traced.prefill, traced.decode)
            for traced in (group.traced for group in self.attempts.groups.values())
            if traced is not None and traced.prefill is not None and traced.handoff is None
        )

    def _groups(self) -> list[Group]:
        """Return the groups of all answers under way."""
        return list({id(answer.group): answer.group for answer in self._answers.values()}.values())

    @contextmanager
    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request], priority: Priority = NO_PRIORITY
    ) -> Iterator[Sequence[AsyncGenerator[TokenChunk]]]:
        """Answer one prompt, several times; see ``Ring.generate``."""
        group = Group(prompt_ids, priority)
        group.answers = [Answer(request, group) for request in requests]
        try:
            yield [self._chunks(answer) for answer in group.answers]
        finally:
            answers = tuple(group.answers)
            for answer in answers:
                self._close(answer)
            for answer in answers:
                answer.group.answers.clear()  # breaks the cycle, which would last until a collection

    async def _chunks(self, answer: Answer) -> AsyncGenerator[TokenChunk]:
        if not answer.group.begun:
            self._start(answer.group)
        wait = answer.arrived.get if answer.group.priority.deadline is None else partial(self._next, answer)
        try:
            finished = False
            while not finished:
                arrived = await wait()
                if isinstance(arrived, RingError):
                    raise arrived
                finished = arrived.finish_reason is not None
                yield arrived
        finally:
            self._close(answer)

    async def _next(self, answer: Answer) -> TokenChunk | RingError:
        """Return the next chunk or error. Ends all answers of the group if the deadline has passed and no
        worker says so."""
        deadline = answer.group.priority.deadline
        assert deadline is not None
        try:
            async with asyncio.timeout(deadline - time.monotonic() + WORKER_TELLS_S):
                return await answer.arrived.get()
        except TimeoutError:
            self.attempts.end(answer.group, deadline_exceeded())
            return await answer.arrived.get()

    def _start(self, group: Group) -> None:
        if group.priority.overdue(time.monotonic()):
            raise deadline_exceeded()
        group.begun = True
        self._answers |= {answer.request.request_id: answer for answer in group.answers}
        self.attempts.start(group)

    def _close(self, answer: Answer) -> None:
        """Close an answer that its client no longer reads."""
        if not answer.closed:
            answer.closed = True
            self._answers.pop(answer.request.request_id, None)
            self.attempts.close(answer)

    # --- events of workers (``baton.router.fleet.worker_client.Watcher``)

    def busy(self, worker: WorkerClient) -> bool:
        return any(worker in answer.group.workers for answer in self._answers.values())

    def on_ready(self, worker: WorkerClient) -> None:
        self.fleet.joined(worker)

    def on_change(self, worker: WorkerClient) -> None:
        self.fleet.changed()
        self.attempts.waiting.changed()
        if worker.draining:
            self._departures.move_from(worker, self._groups())
        self.fleet.warn_of_lonely()

    def on_blocks(self, worker: WorkerClient, events: pb.BlockEvents) -> bool:
        return self.fleet.record_blocks(worker, events)

    def on_lost(self, worker: WorkerClient) -> None:
        self.fleet.left(worker)
        self._departures.lost(worker, self._groups())

    def on_frame(self, worker: WorkerClient, frame: pb.Frame) -> None:
        for delta in frame.deltas:  # runs for every token: keep it short
            if delta.started:
                self._take_start(worker, delta)
                continue
            if _failed(delta):
                group = self.attempts.groups.get(delta.request_id)
                if group is not None and delta.attempt == group.attempt:
                    self._take_failure(group, worker, delta)
                    continue
            answer = self._answers.get(delta.request_id)
            if answer is not None:
                self._take(answer, worker, delta)
        for phases in frame.phases:
            self._take_phases(phases)

    def _take_phases(self, phases: pb.Phases) -> None:
        group = self._group_of(phases.request_id)
        if group is None or group.attempt != phases.attempt or group.traced is None:
            return
        traced = group.traced
        traced.tell(phases, time.perf_counter())
        if traced.prefill is not None:
            self.handoffs.tell(WorkerPair(traced.prefill, traced.decode), phases)

    def _group_of(self, request_id: str) -> Group | None:
        answer = self._answers.get(request_id)
        return self.attempts.groups.get(request_id) or (answer.group if answer else None)

    def _take_start(self, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        group = self._group_of(delta.request_id)
        if group is not None and group.attempt == delta.attempt:
            self._note_begun(group)
            group.computing.add(worker)
            if group.traced is not None and group.traced.started is None:
                group.traced.started = time.perf_counter()

    @staticmethod
    def _note_begun(group: Group) -> None:
        now = time.perf_counter()
        for answer in group.answers:
            answer.request.timings.begun = answer.request.timings.begun or now

    def _take_failure(self, group: Group, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        """Handle the failure of an attempt whose answers have not parted; the one that names it may be
        over."""
        match failure_from_proto(delta):
            case AttemptFailure.REFUSED if delta.link_field:
                self.attempts.link_refused(group, worker, LinkRefusal(delta.link_field, delta.error))
            case AttemptFailure.REFUSED:
                self.attempts.place_again(group, worker, delta.error)
            case AttemptFailure.HANDOFF_LOST:
                self.attempts.handoff_broke(group, worker, delta.error)
            case _:
                self.attempts.end(group, failure(delta), but=worker)

    def _take(self, answer: Answer, worker: WorkerClient, delta: pb.TokenDelta) -> None:
        group = answer.group
        passes = not group.parted and worker is group.decode
        if passes and delta.attempt == group.attempt and not _failed(delta):
            self.attempts.part(group)
        accepted = answer.entry.accept(delta)
        if accepted is None:
            return
        answer.arrived.put(accepted)
        if not isinstance(accepted, RingError):
            self.attempts.got_on(group, worker)
            return
        knows = worker if _failed(delta) else None  # the worker does not know of a gap, which is found here
        if group.parted:
            self.attempts.cancel(group, [answer], but=knows)
        else:
            self.attempts.end(group, accepted, but=knows)


def _failed(delta: pb.TokenDelta) -> bool:
    return delta.finish_reason == inference_pb2.FINISH_REASON_ERROR
