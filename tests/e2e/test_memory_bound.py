"""Queued handoffs cost the two workers next to nothing beside their pools."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path

import pytest

from tests.support.clients import RingClient
from tests.support.ring import Service, running_ring
from tests.support.tiny_models import save_shape

REQUESTS = 200
ENOUGH_DONE = 6
"""Answers to wait for; the others are given up while they are queued."""
PROMPT = 8000
VOCAB = 4096
ROOM = 2
"""Requests that each pool holds. KV of one takes 32 MB: to stage it for a few would show, for all 6.4 GB."""
MOST_GROWTH = 64 << 20
WIDE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 2 * PROMPT,
    "eos_token_id": 1,
}


def peak(service: Service) -> int:
    """Most bytes that a process had in memory since ``forget_peak``."""
    for line in Path(f"/proc/{service.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{service.name} has no VmHWM")


def forget_peak(service: Service) -> None:
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")


def open_handoffs(service: Service) -> int:
    return next(int(v) for k, v in service.metrics().items() if k.startswith("baton_handoffs_open"))


async def ask(client: RingClient, rng: random.Random) -> list[int]:
    prompt = [rng.randrange(2, VOCAB) for _ in range(PROMPT)]
    return (await client.complete(prompt, max_tokens=4, temperature=0)).token_ids


async def queue_up(client: RingClient, workers: list[Service], rng: random.Random) -> dict[str, int]:
    """Ask REQUESTS times at once and give up once ENOUGH_DONE are answered. Returns worker → most handoffs
    that were open there."""
    tasks = [asyncio.create_task(ask(client, rng)) for _ in range(REQUESTS)]
    most = dict.fromkeys((worker.name for worker in workers), 0)
    while sum(task.done() for task in tasks) < ENOUGH_DONE:
        for worker in workers:
            most[worker.name] = max(most[worker.name], await asyncio.to_thread(open_handoffs, worker))
    for task in tasks:
        if task.done():
            assert len(task.result()) == 4
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return most


@pytest.mark.parametrize(
    "connector",
    [
        "tcp",
        pytest.param(
            "ucx",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("ucxx") is None,
                reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
            ),
        ),
        "gloo",
    ],
)
async def test_two_hundred_queued_handoffs_need_no_memory_beside_the_pools(
    tmp_path: Path, connector: str
) -> None:
    path = save_shape(tmp_path / "wide", **WIDE)
    rng = random.Random(0)
    blocks = ROOM * (PROMPT // 16 + 1)
    options = ("--load-format", "dummy", "--connector", connector, "--num-blocks", str(blocks))
    with running_ring(tmp_path, model=str(path), options=options) as ring:
        async with RingClient(ring.url, "wide") as client:
            # Without a queue: every page of the pools is touched, and a step takes what it needs.
            await asyncio.gather(*(ask(client, rng) for _ in range(2 * ROOM)))
            before = {worker.name: peak(worker) for worker in ring.workers}
            for worker in ring.workers:
                forget_peak(worker)
            most = await queue_up(client, ring.workers, rng)
        ring.wait_idle()
        grown = {worker.name: (peak(worker) - before[worker.name]) >> 20 for worker in ring.workers}
    assert min(most.values()) >= 0.9 * REQUESTS, f"most handoffs open at once: {most}"
    assert max(grown.values()) <= MOST_GROWTH >> 20, f"MB beyond the pool: {grown}"
