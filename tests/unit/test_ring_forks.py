"""Several answers to one prompt through a ring: one prefill, one handoff, and each answer as if alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.attempt_failure import AttemptFailure
from baton.core.role import Role
from baton.core.sampling_params import ResolvedSampling
from baton.roles.decode import DecodeRole
from baton.router.dispatch.retries import RetryPolicy
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import Request, RingError
from baton.v1 import handoff_pb2
from tests.support.fake_engine import run_alone
from tests.support.local_worker import LocalWorker, local_ring, until

pytestmark = pytest.mark.usefixtures("launched")

PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40]
PARAMS = ResolvedSampling(max_tokens=12, seed=5, temperature=2.0, ignore_eos=True)


def wanted(n: int, like: ResolvedSampling = PARAMS, name: str = "r") -> list[Request]:
    return [Request(f"{name}-{i}", replace(like, seed=like.seed + 10 * i)) for i in range(n)]


def alone(requests: Sequence[Request], prompt: Sequence[int] = PROMPT) -> list[list[int]]:
    return [run_alone(prompt, request.params) for request in requests]


async def answers(
    ring: WorkerRing, requests: Sequence[Request], most: Sequence[int | None] = ()
) -> list[list[int]]:
    """The tokens of each; ``most``: how many to take of it before its client leaves."""

    async def one(index: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in chunks[index]:
            tokens += chunk.token_ids
            enough = most[index] if index < len(most) else None
            if enough is not None and len(tokens) >= enough:
                await chunks[index].aclose()
                break
        return tokens

    with ring.generate(PROMPT, requests) as chunks:
        return list(await asyncio.gather(*map(one, range(len(requests)))))


def quiet(*workers: LocalWorker) -> bool:
    return not any(worker.held or worker.service.open_work().sequences for worker in workers)


@pytest.mark.parametrize("n", [1, 2, 5])
async def test_the_prompt_is_computed_and_handed_on_once(n: int) -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        requests = wanted(n)
        assert await answers(ring, requests) == alone(requests)
        await until(lambda: quiet(prefill, decode))
        assert prefill.prefill.counters.completed == decode.decode.counters.committed == 1
        assert prefill.engine.generated_tokens == n
        assert decode.engine.generated_tokens == n * 11
        assert decode.engine.stats().scheduler.copied_blocks == n - 1


@pytest.mark.parametrize("roles", [("both",), ("decode",)])
async def test_one_worker_answers_all_by_itself(roles: tuple[Role, ...]) -> None:
    workers = [LocalWorker(role) for role in roles]
    async with local_ring(workers) as ring:
        requests = wanted(4)
        assert await answers(ring, requests) == alone(requests)
        await until(lambda: quiet(*workers))


async def test_those_that_end_with_their_first_token_are_not_handed_on() -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    firsts = [answer[0] for answer in alone(wanted(3))]
    assert len(set(firsts)) == 3, "the test needs other seeds"
    async with local_ring([prefill, decode]) as ring:
        for number, ending in enumerate([firsts[:1], firsts[1:2], firsts[:2], firsts]):
            requests = wanted(3, replace(PARAMS, stop_token_ids=frozenset(ending)), f"r{number}")
            assert await answers(ring, requests) == alone(requests)
            await until(lambda: quiet(prefill, decode))
        assert decode.decode.counters.committed == 3


async def test_one_token_each_needs_no_decode() -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        requests = wanted(3, replace(PARAMS, max_tokens=1))
        assert await answers(ring, requests) == alone(requests)
        await until(lambda: quiet(prefill, decode))
        assert decode.decode.counters.committed == 0


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("who", [0, 1])
async def test_a_client_may_have_enough_of_one(who: int, at: int) -> None:
    """Also of the one in whose name the prompt is computed, and before it is handed on."""
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode", step_s=0.01)
    async with local_ring([prefill, decode]) as ring:
        requests = wanted(3, replace(PARAMS, max_tokens=40))
        most = [at if i == who else None for i in range(3)]
        expected = [answer[: most[i]] for i, answer in enumerate(alone(requests))]
        assert await answers(ring, requests, most) == expected
        await until(lambda: quiet(prefill, decode))
        assert decode.engine.generated_tokens < 3 * 39 - 10


async def test_clients_that_leave_during_prefill_leave_nothing_behind() -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.1), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        asked = asyncio.create_task(answers(ring, wanted(3)))
        await until(lambda: prefill.held)
        asked.cancel()
        await asyncio.wait([asked])
        await until(lambda: quiet(prefill, decode) and not prefill.prefill.open_handoffs)
        await until(lambda: not decode.decode.open_handoffs)
        assert prefill.prefill.open_requests == decode.engine.generated_tokens == 0
        assert not ring._answers
        assert not ring.attempts.groups


async def test_a_broken_handoff_is_done_again_with_the_tokens_that_were_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    take = DecodeRole._take

    def lose_first(role: DecodeRole, link, message: handoff_pb2.PrefillMessage) -> None:  # type: ignore[no-untyped-def]
        complete = message.send_complete
        if message.HasField("send_complete") and complete.name.attempt == 0:
            broken.append(complete.name.request_id)
            name = next(iter(role._timelines))
            # Not before the client has the first tokens.
            asyncio.get_running_loop().call_later(
                0.2,
                role._driver.do,
                lambda now: role._machine.stalled(name, "broken on purpose", now),
            )
        else:
            take(role, link, message)

    broken: list[str] = []
    monkeypatch.setattr(DecodeRole, "_take", lose_first)
    async with local_ring([prefill, decode]) as ring:
        requests = wanted(3)
        # As if others had been told than would be drawn again.
        with ring.generate(PROMPT, requests) as chunks:
            assert [(await anext(each)).token_ids[0] for each in chunks] == [a[0] for a in alone(requests)]
            for answer in ring._answers.values():
                answer.entry.output_ids[:] = [answer.entry.output_ids[0] % 90 + 1]
            given = [list(a.entry.output_ids) for a in ring._answers.values()]
            rest = [[t async for chunk in each for t in chunk.token_ids] for each in chunks]
        assert broken == ["r-0"]
        for tokens, first, request in zip(rest, given, requests, strict=True):
            assert len(tokens) == 11
            single = [Request(f"again-{request.request_id}", request.params)]
            with ring.generate(PROMPT, single) as [again]:
                own = [t async for chunk in again for t in chunk.token_ids]
            assert (tokens == own[1:]) == (first == own[:1])
        await until(lambda: quiet(prefill, decode))


@pytest.mark.parametrize("roles", [("decode", "decode"), ("prefill", "prefill", "decode"), ("both", "both")])
async def test_those_that_meet_a_drain_are_placed_elsewhere(roles: tuple[Role, ...]) -> None:
    workers = [LocalWorker(role) for role in roles]
    async with local_ring(workers) as ring:
        draining = min(workers[:2], key=lambda worker: worker.address)  # whom an idle ring chooses
        draining.service.drain()
        requests = wanted(3)
        assert await answers(ring, requests) == alone(requests)
        assert draining.engine.generated_tokens == 0


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_all_end_when_a_worker_is_lost_for_good(victim: str) -> None:
    workers = {role: LocalWorker(role, step_s=0.05) for role in ("prefill", "decode")}
    async with local_ring(list(workers.values()), policy=RetryPolicy(max_attempts=1)) as ring:
        with ring.generate(PROMPT, wanted(3)) as chunks:
            asked = [asyncio.create_task(anext(each)) for each in chunks]
            if victim == "decode":
                await asyncio.gather(*asked)
                await until(lambda: workers["decode"].held)
                asked = [asyncio.create_task(_rest(each)) for each in chunks]  # type: ignore[arg-type]
            else:
                await until(lambda: workers["prefill"].held)
            await workers[victim].stop()
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, RingError) and each.code == "worker_lost" for each in ended), ended


async def _rest(chunks) -> None:  # type: ignore[no-untyped-def]
    async for _ in chunks:
        pass


async def test_more_forks_than_allowed_are_refused() -> None:
    worker = LocalWorker("both")
    async with local_ring([worker]) as ring:
        with pytest.raises(RingError, match="at most 127 are allowed"):
            await answers(ring, wanted(129))
        requests = wanted(2)
        assert await answers(ring, requests) == alone(requests)


async def test_a_failure_reaches_those_that_go_on_when_the_first_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They all run under the name of the first, which has ended with its first token."""
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    take = DecodeRole._take

    def fail(role: DecodeRole, link, message: handoff_pb2.PrefillMessage) -> None:  # type: ignore[no-untyped-def]
        if message.HasField("send_complete"):
            attempt, failure = message.send_complete.name.attempt, AttemptFailure.WORKER_ERROR
            asyncio.get_running_loop().call_later(
                0.2, prefill.routers.fail, decode_owner(), "r-0", attempt, failure, "broken on purpose"
            )
        else:
            take(role, link, message)

    def decode_owner() -> str:
        [stream] = prefill.routers._streams
        return stream

    monkeypatch.setattr(DecodeRole, "_take", fail)
    first = alone(wanted(1))[0][0]
    async with local_ring([prefill, decode]) as ring:
        requests = wanted(3, replace(PARAMS, stop_token_ids=frozenset({first})))
        with ring.generate(PROMPT, requests) as chunks:
            async with asyncio.timeout(120):
                ended = await asyncio.gather(*map(_rest, chunks), return_exceptions=True)
        assert ended[0] is None
        assert all(isinstance(each, RingError) and "on purpose" in str(each) for each in ended[1:]), ended
