"""Requests go on when their workers do not: every answer is what it would have been, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry
from torch import Tensor

from baton.core.priority import NO_PRIORITY
from baton.core.role import Role
from baton.core.sampling_params import ResolvedSampling
from baton.greeting.cluster_key import ClusterKeys
from baton.router.dispatch.retries import Retries, RetryPolicy
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.suspects import RetryState
from baton.router.dispatch.types import Request, RingError, TokenChunk
from baton.telemetry.resumes import ResumeMetrics
from baton.v1 import worker_pb2
from baton_kernels.paged import PagedBatch
from tests.support.deep import all_deep_but
from tests.support.fake_engine import VOCAB_SIZE
from tests.support.local_worker import SPLIT, LocalWorker, SlowModel, local_ring, until
from tests.support.pretend_worker import AT_ONCE, LENGTH, PretendMembers, PretendWorker, token_after
from tests.unit.test_beam_engine import beams

pytestmark = pytest.mark.usefixtures("launched")

PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40]
PLAIN = ResolvedSampling(max_tokens=40, seed=5, temperature=2.0, ignore_eos=True)
STEP_S = 0.01


@dataclass(frozen=True)
class Kind:
    """Requests of one kind, which all can be repeated."""

    params: ResolvedSampling
    n: int = 1

    def requests(self, name: str) -> list[Request]:
        seeds = (self.params.seed + 10 * index for index in range(self.n))
        return [Request(f"{name}-{i}", replace(self.params, seed=seed)) for i, seed in enumerate(seeds)]


KINDS = {
    "drawn": Kind(PLAIN),
    "greedy": Kind(replace(PLAIN, temperature=0.0)),
    "several": Kind(PLAIN, 3),
    "penalties": Kind(replace(PLAIN, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3)),
    "logprobs": Kind(replace(PLAIN, logprobs=3)),
    "prompt logprobs": Kind(replace(PLAIN, logprobs=1, prompt_logprobs=2), 2),
    "min tokens": Kind(replace(PLAIN, ignore_eos=False, min_tokens=30, stop_token_ids=frozenset(range(60)))),
    "barred": Kind(replace(PLAIN, bad_word_ids=((3, 4), (9,)), logit_bias=((5, 4.0),))),
    "beams": Kind(beams(3, max_tokens=30, stops=frozenset()), 2),
}


@dataclass
class Told:
    """All that the client of one answer was told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[list[float]] = field(default_factory=list)
    """Once for each time that they were told."""
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        if chunk.finish_reason is not None:
            self.finish_reasons.append(chunk.finish_reason)
        if chunk.details is None:
            return
        if chunk.details.logprobs is not None:
            self.logprobs += chunk.details.logprobs.chosen
            self.top_ids += chunk.details.logprobs.top_ids
        if chunk.details.prompt_logprobs is not None:
            self.prompt_logprobs.append(list(chunk.details.prompt_logprobs.chosen))


@dataclass
class Client:
    """Takes all answers to one prompt."""

    answers: list[Told]
    cached: list[int] = field(default_factory=list)
    """The tokens found in a cache, whenever any were told of."""

    @property
    def delivered(self) -> int:
        """Tokens that every answer has."""
        return min(len(told.token_ids) for told in self.answers)

    async def run(
        self, ring: WorkerRing, requests: Sequence[Request], prompt: Sequence[int] = PROMPT
    ) -> None:
        async def take(told: Told, chunks: AsyncGenerator[TokenChunk]) -> None:
            async for chunk in chunks:
                told.add(chunk)
                self.cached += [chunk.cached_tokens] if chunk.cached_tokens else []

        with ring.generate(list(prompt), requests, NO_PRIORITY) as answers:
            async with asyncio.TaskGroup() as tasks:
                for told, chunks in zip(self.answers, answers, strict=True):
                    tasks.create_task(take(told, chunks))


def client(kind: Kind) -> Client:
    return Client([Told() for _ in range(kind.n)])


def workers_of(*roles: Role, step_s: float = STEP_S) -> list[LocalWorker]:
    return [LocalWorker(role, step_s=step_s) for role in roles]


async def undisturbed(kind: Kind) -> list[Told]:
    async with local_ring([LocalWorker("both")]) as ring:
        asked = client(kind)
        await asked.run(ring, kind.requests("alone"))
        return asked.answers


@dataclass
class Counts:
    """The router's metrics."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def metrics(self) -> ResumeMetrics:
        return ResumeMetrics(self.registry)

    def resumes(self, cause: str) -> float:
        return self.registry.get_sample_value("baton_resumes_total", {"cause": cause}) or 0.0

    def given_up(self, reason: str) -> float:
        return self.registry.get_sample_value("baton_requests_given_up_total", {"reason": reason}) or 0.0

    def value(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0


MOMENTS: dict[str, Callable[[Client, LocalWorker], bool]] = {
    "submitted": lambda asked, worker: worker.held > 0,
    "first token": lambda asked, worker: asked.delivered >= 1,
    "in the middle": lambda asked, worker: asked.delivered >= 12,
}
RINGS: dict[str, tuple[Role, ...]] = {
    "prefill": ("prefill", "prefill", "decode"),
    "decode": ("prefill", "decode", "decode"),
    "both": ("both", "both"),
    "the only prefill": ("prefill", "decode"),
}
CASES = [
    (name, victim, moment)
    for at, name in enumerate(KINDS)
    for victim, moment in (
        ("decode", "in the middle"),
        (list(RINGS)[at % 4], "submitted"),
        (list(RINGS)[(at + 1) % 4], "first token"),
    )
    if name != "beams" or moment == "submitted"  # a search tells nothing before its end
]


@pytest.mark.parametrize(("name", "victim", "moment"), all_deep_but(12, CASES))
async def test_a_lost_worker_changes_no_answer(name: str, victim: str, moment: str) -> None:
    kind, counts = KINDS[name], Counts()
    workers = workers_of(*RINGS[victim])
    async with local_ring(workers, metrics=counts.metrics()) as ring:
        asked = client(kind)
        running = asyncio.create_task(asked.run(ring, kind.requests("r")))
        role = victim.rpartition(" ")[2]
        among = [worker for worker in workers if worker.role == role]
        reached = MOMENTS[moment]
        await until(lambda: any(reached(asked, w) and (w.held or role == "prefill") for w in among))
        await max(among, key=lambda worker: worker.held).stop()
        await running
        assert asked.answers == await undisturbed(kind)
        if kind.params.prompt_logprobs is not None:
            assert all(len(told.prompt_logprobs) == 1 for told in asked.answers)
        assert all(cached < len(PROMPT) for cached in asked.cached)
        if role != "prefill":
            assert counts.resumes("worker_lost") in (1, kind.n)
            assert counts.value("baton_resume_pause_seconds_count") >= 1
        assert not ring.attempts.groups
        assert not ring.attempts.searches


@pytest.mark.parametrize("name", ["drawn", "several", "logprobs", "beams"])
async def test_a_decode_worker_that_drains_has_its_streams_written_on_elsewhere(name: str) -> None:
    kind, counts = KINDS[name], Counts()
    kind = replace(kind, params=replace(kind.params, max_tokens=100 if name != "beams" else 30))
    workers = workers_of("prefill", "decode", "decode")
    async with local_ring(workers, metrics=counts.metrics()) as ring:
        asked = client(kind)
        running = asyncio.create_task(asked.run(ring, kind.requests("r")))
        await until(lambda: name == "beams" or asked.delivered >= 5)
        await until(lambda: any(worker.engine.stats().running for worker in workers[1:]))
        draining = max(workers[1:], key=lambda worker: worker.held)
        assert await draining.drain.run(None)
        if name != "beams":
            assert asked.delivered < 60, "it should not have ended what it had"
            assert counts.resumes("drain") == kind.n
        await draining.stop()
        await running
        assert asked.answers == await undisturbed(kind)
        assert counts.resumes("worker_lost") == 0


async def test_with_nobody_else_a_worker_that_drains_ends_what_it_has() -> None:
    kind, counts = KINDS["several"], Counts()
    _, decode = workers = workers_of("prefill", "decode")
    async with local_ring(workers, metrics=counts.metrics()) as ring:
        asked = client(kind)
        running = asyncio.create_task(asked.run(ring, kind.requests("r")))
        await until(lambda: asked.delivered >= 3)
        assert await decode.drain.run(None)
        await running
        assert asked.answers == await undisturbed(kind)
        assert counts.resumes("drain") == 0


async def test_with_another_revision_alone_a_worker_that_drains_ends_what_it_has() -> None:
    kind, counts = Kind(replace(PLAIN, max_tokens=100)), Counts()
    old, new = workers = [
        LocalWorker("both", revision=revision, tells_terms=True, step_s=STEP_S) for revision in ("old", "new")
    ]
    async with local_ring(workers, metrics=counts.metrics()) as ring:
        clients = [client(kind) for _ in range(2)]
        running = [
            asyncio.create_task(asked.run(ring, kind.requests(f"r{i}"))) for i, asked in enumerate(clients)
        ]
        await until(lambda: all(asked.delivered >= 3 for asked in clients))
        assert old.held and new.held, "each has one"
        assert await old.drain.run(None)
        await asyncio.gather(*running)
        assert counts.resumes("drain") == 0


async def test_moves_are_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are written on meanwhile."""
    monkeypatch.setattr("baton.router.dispatch.departures.MOVES_AT_ONCE", 1)
    kind = Kind(replace(PLAIN, max_tokens=150))
    [_, *decodes] = workers = workers_of("prefill", "decode", "decode")
    async with local_ring(workers) as ring:
        clients = [client(kind) for _ in range(4)]
        running = [
            asyncio.create_task(asked.run(ring, kind.requests(f"r{i}"), [*PROMPT, i]))
            for i, asked in enumerate(clients)
        ]
        await until(lambda: all(asked.delivered >= 2 for asked in clients))
        drained = asyncio.create_task(decodes[0].drain.run(None))
        most = 0
        while not drained.done():
            groups = {id(answer.group): answer.group for answer in ring._answers.values()}.values()
            most = max(most, sum(group.left is not None for group in groups))
            await asyncio.sleep(0)
        await asyncio.gather(*running)
        assert most == 1
        assert await drained
    for asked in clients:
        assert len(asked.answers[0].token_ids) == 150


@asynccontextmanager
async def supervised(worker: LocalWorker, again: Callable[[int], LocalWorker]) -> AsyncIterator[list[int]]:
    """Starts the worker again at its port whenever it has crashed. Yields when it did, one entry each."""
    deaths: list[int] = []

    async def supervise(running: LocalWorker) -> None:
        try:
            while True:
                await running.crashed.wait()
                deaths.append(len(deaths))
                await running.stop()
                running = again(running.port)
                await running.start()
        finally:
            await running.stop()

    supervisor = asyncio.create_task(supervise(worker))
    try:
        yield deaths
    finally:
        supervisor.cancel()
        await asyncio.wait([supervisor])


async def test_with_nobody_left_an_answer_waits_for_a_worker() -> None:
    kind = KINDS["several"]
    [worker] = workers_of("both")
    async with local_ring([worker]) as ring:
        asked = client(kind)
        running = asyncio.create_task(asked.run(ring, kind.requests("r")))
        await until(lambda: asked.delivered >= 5)
        await worker.stop()
        late = client(kind)
        waiting = asyncio.create_task(late.run(ring, kind.requests("late")))
        await until(lambda: len(ring.attempts.waiting) == kind.n + 1)
        assert ring.model is not None, "requests can be checked all the same"
        again = LocalWorker("both", port=worker.port)
        await again.start()
        await asyncio.gather(running, waiting)
        assert asked.answers == late.answers == await undisturbed(kind)
        await again.stop()


async def test_it_does_not_wait_for_ever() -> None:
    counts = Counts()
    [worker] = workers_of("both")
    async with local_ring([worker], policy=RetryPolicy(queue_timeout=0.3), metrics=counts.metrics()) as ring:
        asked = client(KINDS["drawn"])
        running = asyncio.create_task(asked.run(ring, KINDS["drawn"].requests("r")))
        await until(lambda: asked.delivered >= 5)
        await worker.stop()
        with pytest.raises(ExceptionGroup) as caught:
            await running
        [error] = caught.value.exceptions
        assert isinstance(error, RingError) and (error.status, error.code) == (503, "worker_lost")
        assert "no worker that can decode is ready, after 0.3 s" in str(error)
        assert counts.given_up("no_worker") == 1
        with pytest.raises(ExceptionGroup) as caught:
            await client(KINDS["drawn"]).run(ring, KINDS["drawn"].requests("new"))
        [error] = caught.value.exceptions
        assert isinstance(error, RingError) and (error.status, error.code) == (503, "no_worker")
        assert not ring._answers and not ring.attempts.searches and not ring.attempts.waiting


async def test_a_client_that_leaves_waits_no_more() -> None:
    [worker] = workers_of("both")
    async with local_ring([worker]) as ring:
        await worker.stop()
        await until(lambda: not ring.ready)
        running = asyncio.create_task(client(KINDS["several"]).run(ring, KINDS["several"].requests("r")))
        await until(lambda: len(ring.attempts.waiting) == 1)
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: not ring.attempts.searches)
        assert not ring.attempts.waiting and not ring._answers


DEADLY = VOCAB_SIZE - 1


class DeadlyModel(SlowModel):
    """Dies of a token."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        if bool((token_ids == DEADLY).any()):
            raise RuntimeError("this is deadly")
        return super().forward(token_ids, batch, pool)


def mortal(port: int = 0) -> LocalWorker:
    return LocalWorker("both", step_s=STEP_S, make_model=DeadlyModel, port=port, mortal=True)


async def test_a_step_that_fails_unasked_ends_its_test() -> None:
    """The clients of such a worker would wait for ever: here nobody ends the process."""
    worker, kind = LocalWorker("both", make_model=DeadlyModel), KINDS["several"]
    with pytest.raises(AssertionError, match="a step of a worker failed"):
        async with asyncio.timeout(120), local_ring([worker]) as ring:
            await client(kind).run(ring, kind.requests("deadly"), [*PROMPT, DEADLY])


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_kills_is_given_up_on_after_two_workers(n: int) -> None:
    counts, kind = Counts(), Kind(replace(PLAIN, allowed_token_ids=tuple(range(DEADLY))), n)
    workers = [mortal() for _ in range(4)]
    async with AsyncExitStack() as stack:
        ring = await stack.enter_async_context(local_ring(workers, metrics=counts.metrics()))
        deaths = [await stack.enter_async_context(supervised(each, mortal)) for each in workers]
        with pytest.raises(ExceptionGroup) as caught:
            await client(kind).run(ring, kind.requests("deadly"), [*PROMPT, DEADLY])
        assert all(isinstance(each, RingError) for each in caught.value.exceptions)
        assert {(e.status, e.code) for e in caught.value.exceptions} == {(500, "poison_request")}
        assert sum(map(len, deaths)) == 2
        assert counts.given_up("poison_request") == 1


async def test_the_neighbours_of_a_request_that_kills_are_not_given_up_on() -> None:
    """They were all on the same workers, twice."""
    counts, kind = Counts(), Kind(replace(PLAIN, max_tokens=60, allowed_token_ids=tuple(range(DEADLY))))
    worker = mortal()
    async with local_ring([worker], metrics=counts.metrics()) as ring, supervised(worker, mortal) as deaths:
        neighbours = [client(kind) for _ in range(5)]
        running = [
            asyncio.create_task(asked.run(ring, kind.requests(f"n{i}"), [*PROMPT, i]))
            for i, asked in enumerate(neighbours)
        ]
        await until(lambda: all(asked.delivered >= 3 for asked in neighbours))
        with pytest.raises(ExceptionGroup) as caught:
            await client(kind).run(ring, kind.requests("deadly"), [*PROMPT, DEADLY])
        [error] = caught.value.exceptions
        assert isinstance(error, RingError) and error.code == "poison_request"
        await asyncio.gather(*running)
        assert len(deaths) <= 3
        assert counts.given_up("poison_request") == 1
    assert all(len(asked.answers[0].token_ids) == 60 for asked in neighbours)


@asynccontextmanager
async def pretended(
    *roles: Role, policy: RetryPolicy = AT_ONCE
) -> AsyncIterator[tuple[WorkerRing, list[PretendWorker]]]:
    """A ring before workers that do nothing by themselves."""
    ring = WorkerRing([], "pretended", ClusterKeys(b"key"), retries=Retries(policy), placement=SPLIT)
    workers = [
        PretendWorker(at, role, lambda name: ring._answers[name].entry.output_ids)
        for at, role in enumerate(roles)
    ]
    ring.fleet.members = PretendMembers(workers)  # type: ignore[assignment]
    for worker in workers:
        worker.start()
    yield ring, workers
    await ring.close()


async def hear(ring: WorkerRing, worker: PretendWorker) -> None:
    said, worker.wire = worker.wire, []
    ring.on_frame(worker, worker_pb2.Frame(deltas=said))  # type: ignore[arg-type]
    await asyncio.sleep(0)


async def test_one_that_waits_too_long_to_be_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.dispatch.attempts.SUSPECT_WAITS_S", 0.05)
    async with pretended("both", "both") as (ring, workers):
        with ring.generate([1], [Request("r", ResolvedSampling(max_tokens=LENGTH))]) as [chunks]:
            asked = asyncio.create_task(anext(chunks))
            await asyncio.sleep(0)
            [group] = ring.attempts.groups.values()
            group.retry_state.watched = True
            assert ring.attempts._suspects.enter(RetryState())
            [its] = [worker for worker in workers if worker.jobs]
            its.end()
            ring.on_lost(its)  # type: ignore[arg-type]
            with pytest.raises(RingError, match="others whose did were before it") as caught:
                await asked
            assert caught.value.code == "worker_lost" and not group.search


@pytest.mark.parametrize("heard_first", ["the handoff", "the death"])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_death_counts_whichever_way_it_is_heard_of(heard_first: str, begun: bool) -> None:
    """Decode may tell of a broken handoff before it is known that the prefill worker died."""
    async with pretended("prefill", "prefill", "decode") as (ring, [*prefills, decode]):
        request = Request("r", ResolvedSampling(max_tokens=LENGTH))
        with ring.generate([1], [request]) as [chunks]:
            asked = asyncio.create_task(anext(chunks))
            await asyncio.sleep(0)
            [group] = ring.attempts.groups.values()
            [prefill] = [worker for worker in prefills if worker.jobs]
            if begun:  # otherwise it was nothing but waiting
                prefill.begin("r", 0)
                await hear(ring, prefill)
            prefill.end()
            if heard_first == "the handoff":
                decode.fail("r", 0)
                await hear(ring, decode)
            ring.on_lost(prefill)  # type: ignore[arg-type]
            await asyncio.sleep(0)
            assert group.retry_state.deaths == int(begun)
            assert group.retry_state.failures == group.attempt == 1
            assert sum(map(len, (worker.jobs for worker in prefills))) == 1, "it is tried again, once"
            asked.cancel()
            await asyncio.wait([asked])


async def test_an_answer_is_written_on_by_the_same_revision_if_there_is_one() -> None:
    async with pretended("both", "both", "both") as (ring, workers):
        for worker, revision in zip(workers, "aab", strict=True):
            assert worker.hello is not None
            worker.hello.revision = revision
        workers[1].given = workers[2].given = 1
        with ring.generate([1], [Request("r", ResolvedSampling(max_tokens=LENGTH))]) as [chunks]:
            asked = asyncio.create_task(anext(chunks))
            await asyncio.sleep(0)
            assert workers[0].jobs
            workers[0].say("r", 0, 0, token_after([1], 0, []))
            await hear(ring, workers[0])
            workers[1].given = 9  # the other one would be chosen
            for at, then in ((0, 1), (1, 2)):
                workers[at].end()
                ring.on_lost(workers[at])  # type: ignore[arg-type]
                await asyncio.sleep(0)
                assert workers[then].jobs, "the same revision, and then any"
            assert (await asked).token_ids == (token_after([1], 0, []),)


async def refused(ring: WorkerRing, prefill: PretendWorker, attempt: int) -> None:
    """Wait until the prefill worker has that attempt, and have it refused, as with a link that fails."""
    await until(lambda: ("r", attempt) in prefill.jobs)
    prefill.fail("r", attempt, refused=True)
    await hear(ring, prefill)


async def test_a_request_is_refused_for_as_long_as_it_may_wait_however_often() -> None:
    policy = replace(AT_ONCE, max_attempts=2, queue_timeout=0.5)
    async with pretended("prefill", "decode", policy=policy) as (ring, [prefill, decode]):
        with ring.generate([1], [Request("r", ResolvedSampling(max_tokens=LENGTH))]) as [chunks]:
            asked = asyncio.create_task(anext(chunks))
            for attempt in range(6):
                await refused(ring, prefill, attempt)
            await until(lambda: ("r", 6) in prefill.jobs)
            decode.say("r", 6, 0, token_after([1], 0, []))
            await hear(ring, decode)
            assert (await asked).token_ids


async def test_a_request_that_everybody_refuses_is_given_up_on_in_time() -> None:
    policy = replace(AT_ONCE, queue_timeout=0.2, first_pause=0.05, max_pause=0.05)
    async with pretended("prefill", "decode", policy=policy) as (ring, [prefill, _]):
        with ring.generate([1], [Request("r", ResolvedSampling(max_tokens=LENGTH))]) as [chunks]:
            asked = asyncio.create_task(anext(chunks))
            async with asyncio.timeout(60):
                attempt = 0
                while not asked.done():
                    await asyncio.sleep(0.005)
                    if ("r", attempt) in prefill.jobs:
                        await refused(ring, prefill, attempt)
                        attempt += 1
            with pytest.raises(RingError, match="pretended") as error:
                await asked
        assert (error.value.status, error.value.code) == (503, "worker_error")
        assert 2 < attempt < 60


NO_BUDGET = replace(AT_ONCE, budget_most=0.0, budget_share=0.0, budget_rate=1e-9, queue_timeout=5.0)


def asks(ring: WorkerRing, name: str) -> AbstractContextManager[Sequence[AsyncGenerator[TokenChunk]]]:
    return ring.generate([1], [Request(name, ResolvedSampling(max_tokens=LENGTH))])


async def unlinked(ring: WorkerRing, prefill: PretendWorker, name: str, attempt: int) -> None:
    """Wait until the prefill worker has that attempt, and have decode refuse the link for ever."""
    await until(lambda: (name, attempt) in prefill.jobs)
    prefill.fail(name, attempt, refused=True, link_field="verify")
    await hear(ring, prefill)


async def test_a_pair_that_can_never_be_linked_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    """Until one of the two is another process. Meanwhile decode computes the prompts itself."""
    async with pretended("prefill", "decode", policy=NO_BUDGET) as (ring, [prefill, decode]):
        with asks(ring, "r") as [chunks], asks(ring, "s") as [others]:
            asked = [asyncio.create_task(anext(chunks))]
            await unlinked(ring, prefill, "r", 0)
            await until(lambda: ("r", 1) in decode.jobs)
            asked.append(asyncio.create_task(anext(others)))
            await until(lambda: ("s", 0) in decode.jobs)
            assert ring.unlinked_pairs() == {"verify": 1}
            for name, attempt in (("r", 1), ("s", 0)):
                decode.say(name, attempt, 0, token_after([1], 0, []))
            await hear(ring, decode)
            await asyncio.gather(*asked)
        told = [record.getMessage() for record in caplog.records if "not paired any more" in record.msg]
        pair = "prefill prefill-0 and decode decode-1"
        assert told == [f"{pair} are not paired any more, as long as both run: pretended"]

        decode.end()
        ring.on_lost(decode)  # type: ignore[arg-type]
        decode.start()
        ring.on_ready(decode)  # type: ignore[arg-type]
        assert ring.unlinked_pairs() == {}
        with asks(ring, "t") as [chunks]:
            asked = [asyncio.create_task(anext(chunks))]
            await until(lambda: ("t", 0) in prefill.jobs)
            decode.say("t", 0, 0, token_after([1], 0, []))
            await hear(ring, decode)
            await asyncio.gather(*asked)


async def test_pairs_that_cannot_be_linked_cost_one_attempt_each_and_no_budget() -> None:
    roles: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
    async with pretended(*roles, policy=NO_BUDGET) as (ring, [first, second, *decodes]):
        with asks(ring, "r") as [chunks]:
            asked = asyncio.create_task(anext(chunks))
            attempt = 0
            while not any(("r", attempt) in decode.jobs for decode in decodes):
                await until(lambda: ("r", attempt) in first.jobs | second.jobs)  # noqa: B023
                await unlinked(ring, first if ("r", attempt) in first.jobs else second, "r", attempt)
                attempt += 1
                await asyncio.sleep(0.01)
            assert attempt == 4
            assert ring.unlinked_pairs() == {"verify": 4}
            [decode] = [each for each in decodes if each.jobs]
            decode.say("r", attempt, 0, token_after([1], 0, []))
            await hear(ring, decode)
            assert (await asked).token_ids


async def test_an_answer_that_gets_on_between_deaths_is_not_given_up_on() -> None:
    """However many workers die, as long as tokens come, or have it in line only; when nothing comes of what
    was begun it is given up on after max_attempts."""
    policy = replace(AT_ONCE, max_attempts=3)
    async with pretended("both", "both", policy=policy) as (ring, workers):
        with ring.generate([1], [Request("r", ResolvedSampling(max_tokens=LENGTH))]) as [chunks]:
            told: list[int] = []
            for attempt in range(8):
                asked = asyncio.create_task(anext(chunks))
                await until(lambda attempt=attempt: any(("r", attempt) in w.jobs for w in workers))  # type: ignore[misc]
                [worker] = [w for w in workers if ("r", attempt) in w.jobs]
                worker.say("r", attempt, len(told), token_after([1], 0, told))
                await hear(ring, worker)
                told += (await asked).token_ids
                worker.end()
                ring.on_lost(worker)  # type: ignore[arg-type]
                worker.start()
            assert len(told) == 8
            asked = asyncio.create_task(anext(chunks))
            for attempt in range(8, 15):
                await until(lambda attempt=attempt: any(("r", attempt) in w.jobs for w in workers))  # type: ignore[misc]
                [worker] = [w for w in workers if ("r", attempt) in w.jobs]
                if attempt < 12:  # it only stands in line
                    worker.end()
                    ring.on_lost(worker)  # type: ignore[arg-type]
                    worker.start()
                else:
                    worker.begin("r", attempt)
                    worker.fail("r", attempt)
                    await hear(ring, worker)
            with pytest.raises(RingError) as error:
                await asked
            assert error.value.code == "worker_error"
