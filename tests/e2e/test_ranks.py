"""A served worker of two ranks: its answers, and how it and its ranks end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ring import Ring, Service, running_ring
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

NAME = "qwen3"
EXIT_CRASHED = 70
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS[NAME](tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def ring(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    options = ("--tensor-parallel-size", "2", "--num-blocks", "128", "--prefill-chunk", "64")
    tmp = tmp_path_factory.mktemp("ring")
    once = ("--max-attempts", "1")
    with running_ring(
        tmp, model=str(model), prefill=0, decode=0, both=1, options=options, router_options=once
    ) as ring:
        yield ring


def ranks_of(worker: Service) -> list[psutil.Process]:
    """The processes of its other ranks."""
    children = psutil.Process(worker.process.pid).children()
    return [child for child in children if "baton.rank" in child.cmdline()]


def errors_since(worker: Service, start: int) -> list[str]:
    """What the log says of errors behind its first ``start`` characters."""
    said = worker.log.read_text()[start:]
    assert "Traceback" not in said
    return [line for line in said.splitlines() if " ERROR " in line]


async def restarted(ring: Ring, worker: Service) -> None:
    worker.restart()
    ring.wait_workers()


async def test_answers_are_those_of_transformers(ring: Ring, model: Path) -> None:
    prompts = [[(i * 29 + n * 3) % 250 for i in range(n)] for n in (1, 20, 150, 300)]
    oracle = [oracle_greedy(model, prompt, 32) for prompt in prompts]
    async with RingClient(ring.url, NAME) as client:
        asked = [client.complete(p, max_tokens=32, temperature=0, ignore_eos=True) for p in prompts]
        answers = await asyncio.gather(*asked)
    for answer, (expected, margin) in zip(answers, oracle, strict=True):
        assert answer.token_ids == expected or margin < 1e-3
    ring.wait_idle()


@pytest.mark.parametrize("busy", all_deep_but(1, [False, True]), ids=["at rest", "in a step"])
async def test_a_dead_rank_ends_the_worker(ring: Ring, busy: bool) -> None:
    [worker] = ring.workers
    [rank] = ranks_of(worker)
    said = len(worker.log.read_text())
    async with RingClient(ring.url, NAME) as client:
        request = asyncio.create_task(client.stream([1, 2, 3], **LONG)) if busy else None
        await asyncio.sleep(0.3)
        assert request is None or not request.done()
        rank.kill()
        killed = time.monotonic()
        assert await asyncio.to_thread(worker.process.wait, 10) == EXIT_CRASHED
        assert time.monotonic() - killed < 2
        if request is not None:
            with pytest.raises((RuntimeError, httpx.HTTPStatusError), match="lost"):
                await asyncio.wait_for(request, 60)
    [error] = errors_since(worker, said)
    assert re.search(rf"rank 1 \(process {rank.pid}\) was killed by SIGKILL; the worker cannot go on$", error)
    await restarted(ring, worker)


@pytest.mark.deep
async def test_ranks_end_with_a_dead_leader(ring: Ring) -> None:
    [worker] = ring.workers
    ranks, said = ranks_of(worker), len(worker.log.read_text())
    assert len(ranks) == 1
    async with RingClient(ring.url, NAME) as client:
        request = asyncio.create_task(client.stream([1, 2, 3], **LONG))
        await asyncio.sleep(0.3)
        worker.kill()
        assert psutil.wait_procs(ranks, 2)[1] == []
        with pytest.raises((RuntimeError, httpx.HTTPStatusError), match="lost"):
            await asyncio.wait_for(request, 60)
    assert errors_since(worker, said) == []
    await restarted(ring, worker)


async def test_an_interrupt_for_all_drains_the_leader_first(ring: Ring) -> None:
    """Whoever is told to end, an answer that is under way is written to its end."""
    [worker] = ring.workers
    ranks = ranks_of(worker)
    said = len(worker.log.read_text())
    async with RingClient(ring.url, NAME) as client:
        request = asyncio.create_task(client.stream([1, 2, 3], **LONG))
        await asyncio.sleep(0.3)
        for number in (signal.SIGINT, signal.SIGTERM):
            for rank in ranks:
                rank.send_signal(number)
        os.kill(worker.process.pid, signal.SIGINT)
        answer = await asyncio.wait_for(request, 60)
    assert len(answer.token_ids) == LONG["max_tokens"]
    assert await asyncio.to_thread(worker.process.wait, 10) == 0
    assert psutil.wait_procs(ranks, 1)[1] == []
    assert errors_since(worker, said) == []
