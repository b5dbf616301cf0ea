"""The router's side of attempts, with anything happening in any order: workers die with words on the wire and
come back, drain, refuse and lose handoffs, frames of old attempts come late, clients leave. Every client gets
exactly the tokens of its answer. The workers are pretended ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.core.role import Role
from baton.core.sampling_params import ResolvedSampling
from baton.greeting.cluster_key import ClusterKeys
from baton.router.dispatch.retries import Retries
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import Request, RingError, TokenChunk
from baton.v1 import worker_pb2 as pb
from tests.support.local_worker import SPLIT
from tests.support.pretend_worker import AT_ONCE, LENGTH, Job, PretendMembers, PretendWorker, true_answer

ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode", "both")


@dataclass
class Client:
    request: Request
    prompt: list[int]
    chunks: AsyncGenerator[TokenChunk]
    token_ids: list[int] = field(default_factory=list)
    error: RingError | None = None
    left: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        return self.task is not None and self.task.done()

    async def run(self) -> None:
        try:
            async for chunk in self.chunks:
                self.token_ids += chunk.token_ids
        except RingError as error:
            self.error = error


class RingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.workers = [PretendWorker(number, role, self._delivered) for number, role in enumerate(ROLES)]
        self.clients: list[Client] = []
        self.contexts = ExitStack()
        self.lost_handoffs = self.deaths = 0
        self._in_loop(self._start())

    async def _start(self) -> None:
        self.ring = WorkerRing(
            [], "pretended", ClusterKeys(b"key"), retries=Retries(AT_ONCE), placement=SPLIT
        )
        self.ring.fleet.members = PretendMembers(self.workers)  # type: ignore[assignment]
        for worker in self.workers:
            worker.start()
            self.ring.on_change(worker)  # type: ignore[arg-type]

    def _delivered(self, name: str) -> list[int]:
        return self.ring._answers[name].entry.output_ids

    def _in_loop(self, doing) -> None:  # type: ignore[no-untyped-def]
        async def settled() -> None:
            await doing
            for _ in range(6):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settled())

    # --- clients

    @rule(n=st.integers(1, 3))
    def ask(self, n: int) -> None:
        async def begin() -> None:
            number = len(self.clients)
            params = ResolvedSampling(max_tokens=LENGTH, seed=number)
            requests = [Request(f"r{number + i}", replace(params, seed=number + i)) for i in range(n)]
            answers = self.contexts.enter_context(self.ring.generate([number], requests))
            for request, chunks in zip(requests, answers, strict=True):
                client = Client(request, [number], chunks)
                client.task = asyncio.create_task(client.run())
                self.clients.append(client)

        self._in_loop(begin())

    @rule(which=st.integers(0, 50))
    def leave(self, which: int) -> None:
        async def leave(client: Client) -> None:
            assert client.task is not None
            client.left = True
            client.task.cancel()
            await asyncio.wait([client.task])
            await client.chunks.aclose()

        going = [client for client in self.clients if not client.over]
        if going:
            self._in_loop(leave(going[which % len(going)]))

    # --- workers

    def _up(self) -> list[PretendWorker]:
        return [worker for worker in self.workers if worker.ready]

    @rule(which=st.integers(0, 50), job=st.integers(0, 50), steps=st.integers(1, 4))
    def compute(self, which: int, job: int, steps: int) -> None:
        busy = [worker for worker in self._up() if worker.jobs]
        for _ in range(steps if busy else 0):
            worker = busy[which % len(busy)]
            if worker.jobs:
                self._step(worker, list(worker.jobs)[job % len(worker.jobs)])

    def _step(self, worker: PretendWorker, key: tuple[str, int]) -> None:
        job = worker.jobs[key]
        if job.submit.HasField("decode"):
            self._hand_on(worker, key, job)
        elif len(job.answers) > 1:
            self._branch(worker, key, job)
        else:
            self._write(worker, key, job)

    def _hand_on(self, worker: PretendWorker, key: tuple[str, int], job: Job) -> None:
        """Prefill's step: the next token of each answer, and then the handoff, if decode is still there."""
        target = job.submit.decode
        decode = next(each for each in self.workers if each.address == target.handoff_address)
        del worker.jobs[key]
        if decode.hello is None or decode.hello.incarnation != target.incarnation:
            worker.fail(*key)
            return
        later = pb.Submit()
        later.CopyFrom(job.submit)
        later.ClearField("decode")
        for name, (_, outputs) in job.answers.items():
            if not (outputs and job.submit.forks):  # the first token of one with siblings may be given
                job.next_token(name)
            worker.say(name, key[1], len(outputs) - 1, outputs[-1])
        decode.jobs[key] = Job(later, job.answers, to_repeat=set(job.answers))

    def _branch(self, worker: PretendWorker, key: tuple[str, int], job: Job) -> None:
        """Each answer becomes a job of its own."""
        del worker.jobs[key]
        for name, answer in job.answers.items():
            own = Job(job.submit, {name: answer}, job.to_repeat & {name})
            worker.jobs[name, key[1]] = own
            self._write(worker, (name, key[1]), own)

    def _write(self, worker: PretendWorker, key: tuple[str, int], job: Job) -> None:
        [name] = job.answers
        outputs = job.answers[name][1]
        if name in job.to_repeat:
            job.to_repeat.clear()
        else:
            job.next_token(name)
        worker.say(name, key[1], len(outputs) - 1, outputs[-1])
        if len(outputs) == LENGTH:
            del worker.jobs[key]

    @rule(which=st.integers(0, 50), count=st.integers(1, 5))
    def hear(self, which: int, count: int) -> None:
        """The router gets what a worker has said, in order."""
        talking = [worker for worker in self._up() if worker.wire]
        if talking:
            self._hear(talking[which % len(talking)], count)

    def _hear(self, worker: PretendWorker, count: int) -> None:
        async def hear() -> None:
            said, worker.wire[:count] = worker.wire[:count], []
            self.ring.on_frame(worker, pb.Frame(deltas=said))  # type: ignore[arg-type]

        self._in_loop(hear())

    @rule(which=st.integers(0, 50))
    def lose_handoff(self, which: int) -> None:
        """Either side may be the one that tells."""
        begun = [
            (w, key, job) for w in self._up() for key, job in w.jobs.items() if job.submit.HasField("decode")
        ]
        taken = [
            (w, key, job)
            for w in self._up()
            for key, job in w.jobs.items()
            if job.to_repeat and len(job.answers) > 1
        ]
        if begun + taken:
            worker, key, _ = (begun + taken)[which % len(begun + taken)]
            del worker.jobs[key]
            worker.fail(*key)
            self.lost_handoffs += 1

    @rule(which=st.integers(0, 50))
    def kill(self, which: int) -> None:
        """With all that it has said and nobody heard."""

        async def kill(worker: PretendWorker) -> None:
            worker.end()
            self.ring.on_lost(worker)  # type: ignore[arg-type]

        if self._up():
            self._in_loop(kill(self._up()[which % len(self._up())]))
            self.deaths += 1

    @rule(which=st.integers(0, 50))
    def start(self, which: int) -> None:
        async def start(worker: PretendWorker) -> None:
            worker.start()
            self.ring.on_change(worker)  # type: ignore[arg-type]

        down = [worker for worker in self.workers if not worker.ready]
        if down:
            self._in_loop(start(down[which % len(down)]))

    @rule(which=st.integers(0, 50))
    def drain(self, which: int) -> None:
        async def drain(worker: PretendWorker) -> None:
            worker.load = pb.Load(draining=True)
            self.ring.on_change(worker)  # type: ignore[arg-type]

        worker = self.workers[which % len(self.workers)]
        if worker.ready and not worker.draining:
            self._in_loop(drain(worker))

    @rule()
    def tick(self) -> None:
        """The router looks after workers that drain; those that have nothing left end."""

        async def tick() -> None:
            for worker in self.workers:
                if not (worker.ready and worker.draining):
                    continue
                self.ring._departures.move_from(worker, self.ring._groups())  # type: ignore[arg-type]
                if not worker.jobs and not worker.wire:
                    worker.drained = True
                    worker.end()
                    self.ring.on_lost(worker)  # type: ignore[arg-type]

        self._in_loop(tick())

    # --- what must hold

    @invariant()
    def delivered_is_true(self) -> None:
        for client in self.clients:
            true = true_answer(client.prompt, client.request.params.seed)
            assert client.token_ids == true[: len(client.token_ids)]
            assert client.error is None

    @invariant()
    def workers_compute_what_is_wanted(self) -> None:
        """Or began with others that are."""
        for worker in self.workers:
            for (_, attempt), job in worker.jobs.items():
                names = (job.submit.request_id, *(fork.request_id for fork in job.submit.forks))
                wanted = (self.ring._answers.get(name) for name in names)
                assert any(each is not None and each.entry.attempt == attempt for each in wanted)

    def teardown(self) -> None:
        try:
            self._come_to_rest()
        finally:
            self._in_loop(self.ring.close())
            self.contexts.close()
            self.loop.close()

    def _come_to_rest(self) -> None:
        """All workers are there; everybody gets the rest."""
        for _ in range(len(self.workers)):
            self.start(0)
        for _ in range(10_000):
            if all(client.over for client in self.clients):
                break
            for worker in self.workers:
                for key in list(worker.jobs):
                    if key in worker.jobs:
                        self._step(worker, key)
                if worker.wire:
                    self._hear(worker, len(worker.wire))
            self.tick()
            self.start(0)
        for client in self.clients:
            if not client.left:
                assert client.over, "it hangs"
                assert client.token_ids == true_answer(client.prompt, client.request.params.seed)
        assert not self.ring.attempts.groups
        assert not self.ring._answers
        assert not self.ring.attempts.searches


@pytest.mark.deep
def test_every_client_gets_exactly_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # The order is random: a request may be there whenever workers die.
    monkeypatch.setattr("baton.router.dispatch.suspects.SUSPECT_AFTER", 10**9)
    run_state_machine_as_test(
        RingMachine, settings=settings(max_examples=120, stateful_step_count=60, deadline=None)
    )
