"""Placement through a ring of workers inside the test's process: where prompts are computed, and what the
router knows of it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import pytest

from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.router.dispatch.retries import RetryPolicy
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import Request, RingError
from baton.router.placement import PlacementOptions
from tests.support.local_worker import LocalWorker, answer, local_ring, until

PROMPTS = [[number, 3, 90, 14, 2, 55, 21, 8, 13, 40] * 4 for number in range(8)]
TOKENS = 12


async def expected(prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What one worker answers alone."""
    async with local_ring([LocalWorker("both")]) as ring:
        return [await answer(ring, f"alone-{n}", prompt, TOKENS) for n, prompt in enumerate(prompts)]


async def test_a_burst_is_computed_on_both_sides_and_its_answers_are_one_workers() -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.02), LocalWorker("decode", step_s=0.005)
    async with local_ring([prefill, decode], placement=PlacementOptions()) as ring:
        asked = (answer(ring, f"r{n}", prompt, TOKENS) for n, prompt in enumerate(PROMPTS))
        assert await asyncio.gather(*asked) == await expected()
        handed_on = prefill.prefill.counters.completed
        assert 0 < handed_on < len(PROMPTS)
        assert decode.engine.generated_tokens == len(PROMPTS) * TOKENS - handed_on


@pytest.mark.parametrize(("disaggregation", "handed_on"), [("always", 8), ("never", 0)])
async def test_it_can_be_settled_where_prompts_are_computed(disaggregation: str, handed_on: int) -> None:
    prefill, decode = LocalWorker("prefill"), LocalWorker("decode")
    options = PlacementOptions(disaggregation)  # type: ignore[arg-type]
    async with local_ring([prefill, decode], placement=options) as ring:
        asked = (answer(ring, f"r{n}", prompt, TOKENS) for n, prompt in enumerate(PROMPTS))
        assert await asyncio.gather(*asked) == await expected()
        assert prefill.prefill.counters.completed == handed_on


async def test_what_is_sent_counts_until_a_report_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that was under way when a request was sent does not know of it."""
    worker = LocalWorker("both", step_s=0.05)
    async with local_ring([worker]) as ring:
        [client] = ring.fleet.workers
        asked = [asyncio.create_task(answer(ring, f"r{n}", p, TOKENS)) for n, p in enumerate(PROMPTS[:3])]
        await asyncio.sleep(0)
        worker.routers.report_loads()  # before the worker has read anything
        assert client.report().sequences == 3
        assert client.report().prefill_tokens == 3 * len(PROMPTS[0])
        await until(lambda: worker.engine.stats().running == 3)
        await until(lambda: client.load.submits_taken == 3)
        assert client.report().sequences == 3, "each counts once"
        await asyncio.gather(*asked)
        await until(lambda: client.report().sequences == client.report().prefill_tokens == 0)


async def test_what_is_to_be_handed_on_counts_at_decode() -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.05), LocalWorker("decode", step_s=0.01)
    async with local_ring([prefill, decode]) as ring:
        clients = {client.address: client for client in ring.fleet.workers}
        asked = [asyncio.create_task(answer(ring, f"r{n}", p, 60)) for n, p in enumerate(PROMPTS[:3])]
        await until(lambda: clients[prefill.address].load.submits_taken == 3)
        last = asyncio.create_task(answer(ring, "last", PROMPTS[3], 60))
        await asyncio.sleep(0)
        assert clients[decode.address].report().sequences == 3
        assert await asyncio.gather(*asked, last)
        await answer(ring, "after", PROMPTS[4], TOKENS)
        await until(lambda: clients[decode.address].report().sequences == 0)


async def test_workers_tell_how_fast_they_are() -> None:
    prefill, decode = LocalWorker("prefill", step_s=0.02), LocalWorker("decode", step_s=0.01)
    async with local_ring([prefill, decode]) as ring:
        await asyncio.gather(*(answer(ring, f"r{n}", p, TOKENS) for n, p in enumerate(PROMPTS)))
        reports = {client.address: client for client in ring.fleet.workers}
        await until(lambda: reports[prefill.address].report().link_bytes_per_s)
        assert 100 < reports[prefill.address].report().prefill_tokens_per_s < 32 / 0.02
        await until(lambda: reports[decode.address].report().step_base_s)
        step_s = reports[decode.address].report().step_base_s
        assert 0.01 < step_s + 4 * reports[decode.address].report().step_row_s < 0.1


class TestNobodyReady:
    """A worker that drains counts as one that is not there."""

    @pytest.mark.parametrize(
        ("missing", "said"), [("prefill", "prefill worker"), ("decode", "that can decode")]
    )
    async def test_requests_fail_if_they_are_not_to_wait(self, missing: str, said: str) -> None:
        workers = [LocalWorker("prefill"), LocalWorker("decode")]
        options = PlacementOptions("always", no_prefill="fail", no_decode="fail")
        async with local_ring(workers, placement=options) as ring:
            await drained(ring, workers, missing)
            with pytest.raises(RingError, match=f"no .*{said}.* is ready$") as refused:
                await answer(ring, "r", PROMPTS[0], TOKENS)
            assert (refused.value.status, refused.value.code) == (503, "no_worker")

    @pytest.mark.parametrize("missing", ["prefill", "decode"])
    async def test_requests_wait_until_somebody_comes(self, missing: str) -> None:
        workers = [LocalWorker("prefill"), LocalWorker("decode")]
        options = PlacementOptions("always", no_prefill="queue", no_decode="queue")
        async with local_ring(workers, placement=options) as ring:
            absent = await drained(ring, workers, missing)
            asked = [asyncio.create_task(answer(ring, f"r{n}", PROMPTS[n], TOKENS)) for n in range(3)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in asked)
            asked[1].cancel()
            with suppress(asyncio.CancelledError):
                await asked.pop(1)
            await back(ring, absent)
            again = [await task for task in asked]
            one, _, two = await expected(PROMPTS[:3])
            assert again == [one, two]
            assert workers[0].prefill.counters.completed == 2

    async def test_they_do_not_wait_for_ever(self) -> None:
        workers = [LocalWorker("prefill"), LocalWorker("decode")]
        options = PlacementOptions("always", no_prefill="queue")
        async with local_ring(workers, placement=options, policy=RetryPolicy(queue_timeout=0.2)) as ring:
            await drained(ring, workers, "prefill")
            with pytest.raises(RingError, match=r"no prefill worker is ready, after 0\.2 s"):
                await answer(ring, "r", PROMPTS[0], TOKENS)

    async def test_nor_beyond_their_deadline(self) -> None:
        workers = [LocalWorker("decode")]
        async with local_ring(workers) as ring:
            await drained(ring, workers, "decode")
            now = time.monotonic()
            with pytest.raises(RingError, match="deadline"):
                await answer(ring, "r", PROMPTS[0], TOKENS, Priority(since=now, deadline=now + 0.1))
            await until(lambda: not ring.attempts.searches)

    async def test_all_answers_of_a_request_wait_together(self) -> None:
        workers = [LocalWorker("prefill"), LocalWorker("decode")]
        options = PlacementOptions("always", no_prefill="queue")
        async with local_ring(workers, placement=options) as ring:
            absent = await drained(ring, workers, "prefill")
            params = ResolvedSampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            with ring.generate(PROMPTS[0], [Request(f"r-{n}", params) for n in range(2)]) as chunks:
                asked = [asyncio.create_task(anext(each)) for each in chunks]
                await asyncio.sleep(0.05)
                await back(ring, absent)
                first, second = await asyncio.gather(*asked)
            assert first.token_ids == second.token_ids

    async def test_prompts_are_computed_at_decode(self) -> None:
        workers = [LocalWorker("prefill"), LocalWorker("decode")]
        async with local_ring(workers) as ring:
            await drained(ring, workers, "prefill")
            assert [await answer(ring, "r", PROMPTS[0], TOKENS)] == await expected(PROMPTS[:1])
            assert workers[1].engine.generated_tokens == TOKENS


async def back(ring: WorkerRing, absent: LocalWorker) -> None:
    """As if it had been started again."""
    absent.service._draining = False
    absent.routers.report_loads()
    client = next(client for client in ring.fleet.workers if client.address == absent.address)
    await until(lambda: not client.draining)
    ring.on_change(client)


async def drained(ring: WorkerRing, workers: list[LocalWorker], role: str) -> LocalWorker:
    [absent] = [worker for worker in workers if worker.role == role]
    absent.service.drain()
    client = next(client for client in ring.fleet.workers if client.address == absent.address)
    await until(lambda: client.draining)
    return absent


async def test_a_decision_is_in_the_log_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    async with local_ring([LocalWorker("prefill"), LocalWorker("decode")]) as ring:
        await answer(ring, "quiet", PROMPTS[0], TOKENS)
        caplog.set_level(logging.DEBUG, "baton.router.placement.placer")
        await answer(ring, "told", PROMPTS[0], TOKENS)
    said = [
        record.getMessage() for record in caplog.records if record.name == "baton.router.placement.placer"
    ]
    assert len(said) == 1
    assert said[0].startswith("request told is placed: 40 tokens at 127.0.0.1:")
