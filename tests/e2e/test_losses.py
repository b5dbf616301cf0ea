"""Clients that leave and workers that die: nothing is kept for the one, a clear error tells of the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.clients import RingClient
from tests.support.ring import Ring, running_ring

LONG = {"max_tokens": 1500, "temperature": 0}


async def leave(client: RingClient, prompt: list[int], after_chunks: int | None) -> None:
    """Send a streaming request and hang up, after so many chunks or (None) before the first."""
    body = client.body(prompt, stream=True, **LONG)

    async def talk() -> None:
        seen = 0
        async with client.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                seen += line.startswith("data: {")
                if after_chunks is not None and seen >= after_chunks:
                    return

    if after_chunks is None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(talk(), 0.05)
    else:
        await talk()


@pytest.mark.parametrize("after_chunks", [None, 1, 20], ids=["in prefill", "first token", "decoding"])
async def test_blocks_are_free_within_a_second_of_a_disconnect(
    demo: RingClient, demo_ring: Ring, after_chunks: int | None
) -> None:
    prompt = list(range(2000 + (after_chunks or 0), 4000))
    for _ in range(3):
        await leave(demo, prompt, after_chunks)
    demo_ring.wait_idle(1.0)


async def test_a_client_that_leaves_a_whole_answer_is_noticed_too(demo: RingClient, demo_ring: Ring) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(demo.complete([1, 2, 3], **LONG), 0.3)
    demo_ring.wait_idle(1.0)


@pytest.fixture(scope="module")
def mortal_ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """A ring whose workers may be killed, and whose router gives a request up with its first attempt."""
    tmp = tmp_path_factory.mktemp("mortal")
    with running_ring(tmp, router_options=("--max-attempts", "1")) as ring:
        yield ring


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker_is_a_clear_error_within_two_seconds(
    mortal_ring: Ring, role: str, stream: bool
) -> None:
    victim = mortal_ring.of_role(role)[0]
    async with RingClient(mortal_ring.url, "demo") as client:
        # Prefill is the victim while it computes (several steps), decode while it streams.
        prompt = list(range(100, 3900)) if role == "prefill" else [5, 6, 7]
        ask = client.stream if stream else client.complete
        fields = {"max_tokens": 100} if role == "prefill" else LONG
        request = asyncio.create_task(ask(prompt, **fields))
        if role == "prefill":
            await until_held(victim.blocks)
        else:
            await asyncio.sleep(0.5)
        assert not request.done(), "the request must be under way when the worker dies"
        killed = time.monotonic()
        victim.kill()
        with pytest.raises((RuntimeError, httpx.HTTPStatusError)) as failure:
            await asyncio.wait_for(request, 60)
        assert time.monotonic() - killed < 2
        assert "lost" in str(failure.value)
        if isinstance(failure.value, httpx.HTTPStatusError):
            assert failure.value.response.status_code == 503
            error = json.loads(failure.value.response.content)["error"]
            assert error["code"] in ("worker_lost", "worker_error")
        for other in mortal_ring.workers:
            if other is not victim:
                await until_idle(other.blocks)
        victim.restart()
        mortal_ring.wait_workers()
        answer = await client.complete([5, 6, 7], max_tokens=8, temperature=0)
        assert len(answer.token_ids) == 8
    mortal_ring.wait_idle()


async def until_held(blocks: Callable[[], dict[str, int]]) -> None:
    """The victim is at work."""
    async with asyncio.timeout(60):
        while not blocks()["held"]:  # noqa: ASYNC110 - another process's figures
            await asyncio.sleep(0.01)


async def until_idle(blocks: Callable[[], dict[str, int]]) -> None:
    """The survivor lets go of what it held for the request."""
    for _ in range(100):
        if not blocks()["held"]:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"the survivor still holds blocks: {blocks()}")
