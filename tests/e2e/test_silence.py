"""A process that is stopped, not killed, says nothing: its peers give it up and free what was open there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, Service, running_ring

pytestmark = pytest.mark.deep

PROMPT = list(range(100, 3900))
FOUND_S = 2.0
"""How long a peer with something open may be silent."""
SLACK_S = 1.0
FAILED = (RuntimeError, httpx.HTTPStatusError)
"""How a request ends in an error: within its stream, or before the first token."""


async def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for _ in iter(condition, True):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    options, once = ("--no-prefix-caching",), ("--max-attempts", "1")
    with running_ring(tmp_path_factory.mktemp("silence"), options=options, router_options=once) as ring:
        yield ring


@pytest.fixture
async def ring(shared: Ring) -> AsyncIterator[Ring]:
    """A ring that must be well again after the test, whoever was stopped."""
    yield shared
    for service in (shared.router, *shared.workers):
        service.thaw()
    await asyncio.to_thread(shared.wait_workers)
    async with RingClient(shared.url, "demo") as client:
        answer = await client.complete([1, 2, 3], max_tokens=8, temperature=0)
        assert len(answer.token_ids) == 8
    shared.wait_idle()


def held(worker: Service) -> int:
    return worker.blocks()["held"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_survivor_frees_its_blocks(ring: Ring, role: str) -> None:
    stopped = ring.of_role(role)[0]
    survivor = next(worker for worker in ring.workers if worker is not stopped)
    async with RingClient(ring.url, "demo") as client:
        request = asyncio.create_task(client.stream(PROMPT, max_tokens=8))
        await until(lambda: held(survivor) > 0, 5)
        stopped.freeze()
        await until(lambda: held(survivor) == 0, 6)
        await asyncio.gather(request, return_exceptions=True)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_router_gives_up_a_busy_worker_that_is_stopped(ring: Ring, role: str) -> None:
    stopped = ring.of_role(role)[0]
    prompt, tokens = (PROMPT, 8) if role == "prefill" else ([1, 2, 3], 1500)
    async with RingClient(ring.url, "demo") as client:
        request = asyncio.create_task(client.stream(prompt, max_tokens=tokens))
        await until(lambda: held(stopped) > 0, 5)
        stopped.freeze()
        began = time.monotonic()
        with pytest.raises(FAILED, match="lost"):
            await request
        assert time.monotonic() - began < FOUND_S + SLACK_S


async def test_workers_cancel_the_requests_of_a_router_that_is_stopped(ring: Ring) -> None:
    prefill, decode = (ring.of_role(role)[0] for role in ("prefill", "decode"))
    async with RingClient(ring.url, "demo") as client:
        requests = [asyncio.create_task(client.stream([1, 2, 3], max_tokens=1500)) for _ in range(4)]
        requests.append(asyncio.create_task(client.stream(PROMPT, max_tokens=290)))
        await until(lambda: held(prefill) > 0 and held(decode) > 0, 5)
        ring.router.freeze()
        await until(lambda: held(prefill) == held(decode) == 0, FOUND_S + SLACK_S)
        ring.router.thaw()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(end, FAILED) for end in ends)
