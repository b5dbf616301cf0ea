"""Priorities and deadlines through real services: one worker, and prefill and decode."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest

from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.table import Grammar
from baton.net.heartbeat import TICK_S
from baton.roles.decode import DecodeRole
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import Request, RingError
from baton.transport.stream import Stream
from baton.transport.tcp import Receive, TcpReceivingLink
from baton.v1 import inference_pb2 as pb
from tests.support.fake_engine import fake_engine, run_alone
from tests.support.local_worker import LocalWorker, answer, local_ring, until

PROMPT = [5, 17, 33, 2, 8, 40, 12, 9, 61]
STEP_S = 0.01
AGING = 0.15
by_priority = partial(fake_engine, priority_aging=AGING)


def prioritized(priority: int = 0, *, timeout: float | None = None) -> Priority:
    now = time.monotonic()
    return Priority(priority, now, None if timeout is None else now + timeout)


def expected(tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    return run_alone(prompt, ResolvedSampling(max_tokens=tokens, temperature=0.0, ignore_eos=True))


def test_travels_as_durations() -> None:
    sent = Priority(-3, since=100.0, deadline=107.25).to_proto(now=102.5)
    assert sent == pb.Priority(level=-3, waited_ms=2500, remaining_ms=4750)
    assert Priority.from_proto(sent, now=9.0) == Priority(-3, since=6.5, deadline=13.75)
    assert Priority.from_proto(Priority().to_proto(now=0.0), now=9.0) == Priority(0, since=9.0)
    late = Priority(since=5.0, deadline=1.0).to_proto(now=2.0)  # neither is ever negative
    assert (late.waited_ms, late.remaining_ms) == (0, 0)


# --- priorities


def workers_of(kind: str, make_engine: Callable[..., object], step_s: float = STEP_S) -> list[LocalWorker]:
    roles = {"one worker": ["both"], "ring": ["prefill", "decode"]}[kind]
    return [LocalWorker(role, step_s=step_s, make_engine=make_engine) for role in roles]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["one worker", "ring"])
async def test_the_urgent_are_answered_first(kind: str) -> None:
    """Both wait for the one seat, or for decode's room; the one that came last goes first."""
    make = partial(fake_engine, priority_aging=30.0, max_num_seqs=1, num_blocks=6)
    async with local_ring(workers := workers_of(kind, make, 0.04)) as ring:
        ended: list[str] = []

        async def ask(name: str, priority: int) -> None:
            assert await answer(ring, name, PROMPT, 12, prioritized(priority)) == expected(12)
            ended.append(name)

        tasks = [asyncio.create_task(ask("first", 0))]
        await until(lambda: workers[-1].engine.stats().running)
        for name, priority in (("later", 2), ("late", 1), ("now", -1)):
            tasks.append(asyncio.create_task(ask(name, priority)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
    assert ended == ["first", "now", "late", "later"]


async def test_nobody_starves_behind_a_stream_of_urgent_requests() -> None:
    """One seat, and always eight urgent requests that want it, for as long as the long one is not done. Only
    those go before it that came within D."""
    worker = LocalWorker("both", step_s=STEP_S, make_engine=partial(by_priority, max_num_seqs=1))
    async with local_ring([worker]) as ring:
        first = asyncio.create_task(answer(ring, "first", PROMPT, 30))  # has the seat while they come
        await until(lambda: worker.held)
        patience = prioritized(12)  # a D that lasts on a busy machine too
        patient = asyncio.create_task(answer(ring, "patient", PROMPT, 20, patience))
        overtook: list[Priority] = []

        async def stream(client: int) -> None:
            number = 0
            while not patient.done():
                number += 1
                haste = prioritized(0)
                await answer(ring, f"urgent{client}-{number}", PROMPT, 2, haste)
                if not patient.done():
                    overtook.append(haste)

        streams = [asyncio.create_task(stream(client)) for client in range(8)]
        async with asyncio.timeout(60):
            assert await patient == expected(20)
        await first
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert len(overtook) > 8  # there was a stream, and it went first
    # The worker's clock began when a request had come to it: the way there is slow on a busy machine.
    slack = 0.5
    assert max(haste.since for haste in overtook) < patience.since + patience.level * AGING + slack


async def test_a_priority_is_refused_under_fcfs() -> None:
    async with local_ring([LocalWorker("both")]) as ring:
        with pytest.raises(
            RingError, match="priority is 1; allowed: 0, as this worker's scheduling policy is"
        ):
            await answer(ring, "r", PROMPT, 4, prioritized(1))


# --- deadlines


async def test_a_deadline_ends_a_request_that_runs() -> None:
    [worker] = workers = workers_of("one worker", fake_engine, 0.02)
    async with local_ring(workers) as ring:
        other = asyncio.create_task(answer(ring, "other", PROMPT, 40))
        began = time.monotonic()
        with pytest.raises(RingError, match="deadline passed") as caught:
            await answer(ring, "r", PROMPT, 200, prioritized(timeout=0.3))
        assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
        assert 0.3 <= time.monotonic() - began < 3
        await until(lambda: "r" not in worker.engine._sequences)
        assert worker.service.stats().deadlines_exceeded == 1
        assert await other == expected(40)
        await until(lambda: worker.held == 0)


async def test_a_deadline_ends_a_request_that_waits() -> None:
    [worker] = workers = workers_of("one worker", partial(fake_engine, max_num_seqs=1), 0.02)
    async with local_ring(workers) as ring:
        other = asyncio.create_task(answer(ring, "other", PROMPT, 100))
        await until(lambda: worker.held)
        with pytest.raises(RingError, match="deadline passed"):
            await answer(ring, "r", PROMPT, 4, prioritized(timeout=0.2))
        await until(lambda: worker.engine.stats().waiting == 0)
        assert not other.done()
        assert await other == expected(100)


async def test_a_deadline_ends_a_request_that_waits_for_decodes_room() -> None:
    prefill = LocalWorker("prefill")
    decode = LocalWorker("decode", step_s=0.05, make_engine=partial(fake_engine, num_blocks=14))
    async with local_ring([prefill, decode]) as ring:
        other = asyncio.create_task(answer(ring, "other", PROMPT, 40))
        await until(lambda: decode.held)
        with pytest.raises(RingError, match="deadline passed"):
            await answer(ring, "r", [*range(3, 53)], 4, prioritized(timeout=0.3))
        await until(lambda: prefill.held == 0 and prefill.prefill.open_requests == 0)
        assert prefill.service.stats().deadlines_exceeded + decode.service.stats().deadlines_exceeded >= 1
        assert await other == expected(40)
        await until(lambda: decode.held == 0 and decode.decode.open_handoffs == 0)


async def test_a_deadline_follows_a_request_to_decode() -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode", step_s=0.02)
    async with local_ring([prefill, decode]) as ring:
        with pytest.raises(RingError, match="deadline passed"):
            await answer(ring, "r", PROMPT, 200, prioritized(timeout=1.0))
        await until(lambda: decode.service.stats().deadlines_exceeded == 1)
        await until(lambda: prefill.held == decode.held == 0)
        assert decode.engine.generated_tokens > 0


async def test_a_deadline_is_told_once_though_pages_are_written_to_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, may_end = TcpReceivingLink._take, threading.Event()

    def slowly(link: TcpReceivingLink, stream: Stream, receive: Receive) -> None:
        may_end.wait(60)
        take(link, stream, receive)

    monkeypatch.setattr(TcpReceivingLink, "_take", slowly)
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        with pytest.raises(RingError, match="deadline passed"):
            await answer(ring, "r", PROMPT, 4, prioritized(timeout=0.4))
        await until(lambda: decode.service.stats().deadlines_exceeded)
        await asyncio.sleep(5 * TICK_S)
        assert decode.decode.open_handoffs == decode.service.stats().deadlines_exceeded == 1
        may_end.set()
        await until(lambda: prefill.held == decode.held == 0)


# --- deadlines of several answers to one prompt


def wanted(n: int, max_tokens: int = 200) -> list[Request]:
    params = ResolvedSampling(max_tokens=max_tokens, temperature=2.0, ignore_eos=True)
    return [Request(f"r-{i}", replace(params, seed=i)) for i in range(n)]


async def ends_of(ring: WorkerRing, requests: list[Request], timeout: float, leave: int = -1) -> list[str]:
    """How each answer ended: its length, or the code of its error. Of the one with index ``leave`` the client
    takes one token."""

    async def one(index: int) -> str:
        tokens = 0
        try:
            async for chunk in chunks[index]:
                tokens += len(chunk.token_ids)
                if index == leave:
                    break
        except RingError as error:
            assert error.status == 504
            return error.code
        finally:
            await chunks[index].aclose()
        return str(tokens)

    with ring.generate(PROMPT, requests, prioritized(timeout=timeout)) as chunks:
        return await asyncio.gather(*map(one, range(len(requests))))


@pytest.mark.parametrize("kind", ["one worker", "ring"])
async def test_a_deadline_ends_all_answers_that_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.dispatch.ring.WORKER_TELLS_S", 60.0)
    workers = workers_of(kind, fake_engine, 0.02)
    async with local_ring(workers) as ring:
        assert await ends_of(ring, wanted(3), 1.0) == ["deadline_exceeded"] * 3
        await until(lambda: not any(worker.held for worker in workers))
        assert not ring._answers
        assert workers[-1].engine.generated_tokens > 3


async def test_a_deadline_ends_all_answers_during_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.dispatch.ring.WORKER_TELLS_S", 60.0)
    prefill, decode = LocalWorker("prefill", step_s=0.6), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        assert await ends_of(ring, wanted(3), 0.3) == ["deadline_exceeded"] * 3
        await until(lambda: prefill.held == 0 and not prefill.prefill.open_requests)
        await until(lambda: not prefill.prefill.open_handoffs and not decode.decode.open_handoffs)
        assert decode.engine.generated_tokens == 0
        assert not ring.attempts.groups


async def test_a_deadline_ends_the_others_when_the_first_has_left_before_the_handoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers know what is computed for all by the name of an answer that is over."""
    monkeypatch.setattr("baton.router.dispatch.ring.WORKER_TELLS_S", 60.0)
    monkeypatch.setattr(DecodeRole, "_commit", lambda role, commit: None)  # it never takes over
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        async with asyncio.timeout(60):
            assert await ends_of(ring, wanted(3), 0.5, leave=0) == ["1", *["deadline_exceeded"] * 2]
        assert not ring.attempts.groups


async def test_a_deadline_ends_a_request_whose_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is with the engine, and not with the scheduler."""
    monkeypatch.setattr("baton.router.dispatch.ring.WORKER_TELLS_S", 60.0)
    guided = ResolvedSampling(max_tokens=9, structured_output=StructuredOutput("regex", "a*"))
    make = partial(fake_engine, grammars=NeverCompiled(), eos_token_ids=frozenset({1}))
    async with local_ring(workers := workers_of("one worker", make)) as ring:
        requests = [Request("r-0", guided), Request("r-1", replace(guided, seed=1))]
        assert await ends_of(ring, requests, 0.3) == ["deadline_exceeded"] * 2
        assert not workers[0].engine.has_work


class NeverCompiled(GrammarCompiler):
    """Still at it."""

    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("not used"))

    def compile(self, output: StructuredOutput, tenant: str = "") -> Future[Grammar]:
        return Future()


async def test_the_router_ends_all_answers_that_no_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even those that nobody waits for at that moment."""
    [worker] = workers = workers_of("one worker", fake_engine, 0.02)
    async with local_ring(workers) as ring:
        monkeypatch.setattr(worker.service, "_end_overdue", lambda now: None)
        with ring.generate(PROMPT, wanted(3), prioritized(timeout=0.3)) as [first, *others]:
            with pytest.raises(RingError, match="deadline passed"):
                async for _ in first:
                    pass
            await until(lambda: worker.held == 0)  # they were cancelled there
            for chunks in others:
                with pytest.raises(RingError, match="deadline passed"):
                    async for _ in chunks:
                        pass


async def test_the_router_keeps_a_deadline_that_no_worker_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    [worker] = workers = workers_of("one worker", fake_engine, 0.02)
    async with local_ring(workers) as ring:
        monkeypatch.setattr(worker.service, "_end_overdue", lambda now: None)
        began = time.monotonic()
        with pytest.raises(RingError) as caught:
            await answer(ring, "r", PROMPT, 200, prioritized(timeout=0.2))
        assert caught.value.code == "deadline_exceeded"
        assert time.monotonic() - began < 3
        await until(lambda: worker.held == 0)  # it was cancelled there
        with pytest.raises(RingError) as caught:
            await answer(ring, "past", PROMPT, 4, prioritized(timeout=-1.0))
        assert caught.value.code == "deadline_exceeded"
