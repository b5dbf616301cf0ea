"""Stages of requests where they are: on workers, and on their way through the router's ring."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from baton.core.priority import NO_PRIORITY
from baton.core.sampling_params import ResolvedSampling
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import Request
from tests.support.local_worker import LocalWorker, local_ring, until

PROMPT = list(range(1, 11))


def requests(count: int, max_tokens: int) -> list[Request]:
    params = ResolvedSampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [Request(f"r-{number}", params) for number in range(count)]


async def run(ring: WorkerRing, asked: Sequence[Request]) -> None:
    with ring.generate(PROMPT, asked, NO_PRIORITY) as answers:

        async def take(index: int) -> None:
            async for _ in answers[index]:
                pass

        async with asyncio.TaskGroup() as tasks:
            for index in range(len(answers)):
                tasks.create_task(take(index))


def counted(worker: LocalWorker, metric: str) -> dict[str, float]:
    """How many observations there are of each stage."""
    return {
        sample.labels["stage"]: sample.value
        for family in worker.registry.collect()
        for sample in family.samples
        if sample.name == f"{metric}_count"
    }


@pytest.mark.parametrize("answers", [1, 3])
async def test_each_worker_tells_of_the_stages_that_are_its_own(answers: int) -> None:
    workers = [LocalWorker("prefill"), LocalWorker("decode")]
    async with local_ring(workers) as ring:
        await run(ring, requests(answers, 5))
        prefill, decode = workers
        handoff = "baton_handoff_stage_seconds"
        await until(lambda: counted(decode, handoff).get("first_step"))
        assert counted(prefill, "baton_request_stage_seconds") == {"prefill_queue": 1, "prefill": 1}
        assert counted(decode, "baton_request_stage_seconds") == {}
        assert counted(prefill, handoff) == {"ask": 1, "flush": 1}
        assert set(counted(decode, handoff).values()) == {1}


async def test_who_computes_prompts_itself_tells_of_both() -> None:
    worker = LocalWorker("both")
    async with local_ring([worker]) as ring:
        await run(ring, requests(1, 5))
        assert counted(worker, "baton_request_stage_seconds") == {"prefill_queue": 1, "prefill": 1}
        work = worker.service.stats().engine.work
        assert work.prompt_tokens >= len(PROMPT) - 1
        assert work.steps >= 5
        assert work.seconds > 0


async def test_a_request_knows_how_far_it_has_come() -> None:
    workers = [LocalWorker("prefill"), *(LocalWorker("decode", step_s=0.01) for _ in range(2))]
    async with local_ring(workers) as ring:
        [asked] = requests(1, 60)
        running = asyncio.create_task(run(ring, [asked]))
        await until(lambda: any(worker.engine.stats().running for worker in workers[1:]))
        timings = asked.timings
        assert timings.placed is not None
        assert timings.begun is not None
        assert timings.placed <= timings.begun
        assert timings.interruptions == 0
        before = timings.placed, timings.begun
        await max(workers[1:], key=lambda worker: worker.held).stop()
        await running
        assert timings.interruptions == 1
        assert (timings.placed, timings.begun) == before
