"""Beam searches through a ring: one prefill, one handoff, and the answers that one worker alone finds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.attempt_failure import AttemptFailure
from baton.core.beam_search import BeamParams
from baton.core.logprobs import Logprobs
from baton.core.sampling_params import ResolvedSampling
from baton.handoff.messages import Commit
from baton.roles.decode import DecodeRole
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import Request, RingError, TokenChunk
from tests.support.fake_engine import fake_engine
from tests.support.local_worker import LocalWorker, answer, local_ring, until
from tests.support.oracle_beams import Answer
from tests.unit.test_beam_engine import alone, beams

pytestmark = pytest.mark.usefixtures("launched")

PROMPT = (7, 3, 90, 14, 2, 55, 21, 8, 13, 40)
PARAMS = beams(3)


async def chunks_of(
    ring: WorkerRing, params: ResolvedSampling, n: int, name: str = "r", prompt: Sequence[int] = PROMPT
) -> list[list[TokenChunk]]:
    async def one(index: int) -> list[TokenChunk]:
        return [chunk async for chunk in answers[index]]

    requests = [Request(f"{name}-{index}", replace(params, seed=index)) for index in range(n)]
    with ring.generate(list(prompt), requests) as answers:
        return list(await asyncio.gather(*map(one, range(n))))


def told(answers: list[list[TokenChunk]]) -> list[tuple[list[int], str | None]]:
    return [
        ([t for chunk in chunks for t in chunk.token_ids], chunks[-1].finish_reason) for chunks in answers
    ]


def wanted(answers: list[Answer]) -> list[tuple[list[int], str | None]]:
    return [(answer.token_ids, answer.finish_reason.value) for answer in answers]


def quiet(*workers: LocalWorker) -> bool:
    return not any(worker.held or worker.service.open_work().sequences for worker in workers)


@pytest.mark.parametrize(
    ("params", "n"),
    [
        (PARAMS, 1),
        (PARAMS, 3),
        (beams(4, stops=frozenset(), length_penalty=-1.0), 2),
        (beams(3, max_tokens=1), 3),
        (beams(3, max_tokens=2), 3),
    ],
    ids=lambda value: str(value)[-60:],
)
async def test_the_prompt_is_computed_and_handed_on_once(params: ResolvedSampling, n: int) -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        assert told(await chunks_of(ring, params, n)) == wanted(alone(PROMPT, params, n))
        await until(lambda: quiet(prefill, decode))
        once = int(params.max_tokens > 1)
        assert prefill.prefill.counters.completed == decode.decode.counters.committed == once
        assert prefill.engine.stats().scheduler.prefix_queried_tokens == len(PROMPT)


async def test_a_search_that_is_over_with_its_first_step_is_told_by_decode() -> None:
    [best] = alone(PROMPT, beams(1, stops=frozenset()), 1)
    params = ResolvedSampling(
        max_tokens=9, stop_token_ids=frozenset(best.token_ids[:1]), beam_search=BeamParams(1)
    )
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        assert told(await chunks_of(ring, params, 1)) == [(best.token_ids[:1], "stop")]
        await until(lambda: quiet(prefill, decode))
        assert decode.decode.counters.committed == 1


async def test_one_worker_answers_it_all() -> None:
    both = LocalWorker("both")
    async with local_ring([both]) as ring:
        assert told(await chunks_of(ring, PARAMS, 3)) == wanted(alone(PROMPT, PARAMS, 3))
        await until(lambda: quiet(both))


async def test_log_probabilities_of_answers_and_prompt_come_with_them() -> None:
    params = replace(PARAMS, logprobs=2, prompt_logprobs=1)
    prefill, decode, both = LocalWorker("prefill"), LocalWorker("decode"), LocalWorker("both")
    async with local_ring([both]) as ring:
        by_one = await chunks_of(ring, params, 2)
    async with local_ring([prefill, decode]) as ring:
        assert await chunks_of(ring, params, 2) == by_one
    for answer_chunks in by_one:
        details = [chunk.details for chunk in answer_chunks]
        assert all(each is not None and each.logprobs is not None for each in details)
        assert [each.prompt_logprobs is not None for each in details if each] == [True] + [False] * (
            len(details) - 1
        )
        assert isinstance(details[0] and details[0].prompt_logprobs, Logprobs)


async def test_other_requests_run_beside_it_in_a_pool_too_small() -> None:
    prefill = LocalWorker("prefill")
    decode = LocalWorker("decode", make_engine=lambda **kept: fake_engine(26, **kept))
    params = beams(3, max_tokens=20, stops=frozenset())
    async with local_ring([prefill, decode]) as ring:
        plain = [asyncio.create_task(answer(ring, f"p{i}", [5, i, 9], 30)) for i in range(4)]
        searches = [chunks_of(ring, params, 3, f"s{i}", (*PROMPT, i)) for i in range(3)]
        found = await asyncio.gather(*searches)
        assert [told(each) for each in found] == [wanted(alone((*PROMPT, i), params, 3)) for i in range(3)]
        tokens = await asyncio.gather(*plain)
        await until(lambda: quiet(prefill, decode))
        load = decode.engine.stats()
        assert load.scheduler.preemptions > 0
        assert load.scheduler.copied_blocks > 0
    for i, each in enumerate(tokens):
        async with local_ring([LocalWorker("both")]) as ring:
            assert await answer(ring, f"p{i}", [5, i, 9], 30) == each


async def test_a_client_that_leaves_ends_it_everywhere() -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.01), LocalWorker("decode", step_s=0.02)
    params = beams(3, max_tokens=60, stops=frozenset())
    async with local_ring([prefill, decode]) as ring:
        for name, begun in (("a", lambda: prefill.held), ("b", lambda: decode.engine.stats().running == 3)):
            task = asyncio.create_task(chunks_of(ring, params, 2, name))
            await until(begun)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: quiet(prefill, decode))


async def test_what_does_not_fit_is_refused_at_once_and_hurts_nobody() -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        beside = asyncio.create_task(answer(ring, "p", [5, 1, 9], 30))
        with pytest.raises(RingError, match="needs 130 blocks of the KV cache, which has 64") as refused:
            await chunks_of(ring, beams(4, max_tokens=120), 1)
        assert refused.value.status == 400
        assert len(await beside) == 30
        await until(lambda: quiet(prefill, decode))


async def test_an_attempt_that_is_lost_begins_again_at_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, lost = DecodeRole._commit, 0

    def lose_once(self: DecodeRole, done: Commit) -> None:
        nonlocal lost
        lost += 1
        if lost > 1:
            commit(self, done)
            return
        sequence = self._room.take(done.name)
        assert sequence is not None
        self._timelines.pop(done.name)
        self._engine.pool.free(done.binding.pages)
        self._outlet.fail(sequence.owner, *done.name, AttemptFailure.HANDOFF_LOST, "lost by the test")

    monkeypatch.setattr(DecodeRole, "_commit", lose_once)
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    async with local_ring([prefill, decode]) as ring:
        assert told(await chunks_of(ring, PARAMS, 3)) == wanted(alone(PROMPT, PARAMS, 3))
        assert lost == 2
        await until(lambda: quiet(prefill, decode))
