"""A worker that is stopped, not killed, says nothing: its peer gives up the link and frees the blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients import RingClient
from tests.support.ring import running_ring

PROMPT = list(range(100, 3900))


async def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for _ in iter(condition, True):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_survivor_frees_its_blocks_and_links_again(role: str, tmp_path: Path) -> None:
    with running_ring(tmp_path) as ring:
        stopped = ring.of_role(role)[0]
        survivor = next(worker for worker in ring.workers if worker is not stopped)
        async with RingClient(ring.url, "demo") as client:
            await client.complete([1, 2, 3], max_tokens=2)
            request = asyncio.create_task(client.stream(PROMPT, max_tokens=8))
            await until(lambda: survivor.blocks()["held"] > 0, 5)
            stopped.freeze()
            await until(lambda: survivor.blocks()["held"] == 0, 6)
            stopped.thaw()
            await asyncio.gather(request, return_exceptions=True)
            ring.wait_workers()
            answer = await client.complete([1, 2, 3], max_tokens=8, temperature=0)
            assert len(answer.token_ids) == 8
        ring.wait_idle()
