"""Queued handoffs cost the two workers next to nothing beside their pools."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path

import pytest

from tests.support.clients import RingClient
from tests.support.nixl import needs_nixl
from tests.support.ring import Service, running_ring
from tests.support.tiny_models import save_shape

pytestmark = [pytest.mark.beside, pytest.mark.deep]

REQUESTS = 200
ENOUGH_DONE = 4
"""Answers to wait for; the others are given up while they are queued."""
PROMPT = 2000
NEW_TOKENS = 4
VOCAB = 4096
ROOM = 2
"""Requests that each pool holds. KV of one takes 32 MB: to stage it for a few would show, for all 6.4 GB.
It has so many heads because a longer prompt would take longer to compute."""
MAX_GROWTH = 64 << 20
WIDE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2 * PROMPT,
    "eos_token_id": 1,
}


without_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
)


def pool_of(block_size: int) -> tuple[str, ...]:
    """Options of a worker with room for ROOM requests."""
    num_blocks = ROOM * -(-(PROMPT + NEW_TOKENS) // block_size)
    return ("--block-size", str(block_size), "--num-blocks", str(num_blocks))


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
    return (await client.complete(prompt, max_tokens=NEW_TOKENS, temperature=0)).token_ids


async def queue_up(client: RingClient, workers: list[Service], rng: random.Random) -> dict[str, int]:
    """Ask REQUESTS times, much faster than that is answered, and give up once ENOUGH_DONE are. Returns
    worker → most handoffs that were open there."""
    tasks = list[asyncio.Task[list[int]]]()
    for _ in range(REQUESTS):
        tasks.append(asyncio.create_task(ask(client, rng)))
        await asyncio.sleep(0.01)  # one after another: this is no test of the router's
    most = dict.fromkeys((worker.name for worker in workers), 0)
    while not all(most.values()) or sum(task.done() for task in tasks) < ENOUGH_DONE:
        for worker in workers:
            most[worker.name] = max(most[worker.name], await asyncio.to_thread(open_handoffs, worker))
        await asyncio.sleep(0.2)
    for task in tasks:
        if task.done():
            assert len(task.result()) == NEW_TOKENS
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return most


@pytest.mark.parametrize(
    ("connector", "prefill_block", "decode_block"),
    [
        ("tcp", 16, 16),
        # Between differing block sizes the side with the larger ones copies what travels.
        pytest.param("ucx", 16, 64, marks=without_ucxx),
        pytest.param("nixl", 64, 16, marks=needs_nixl),
        ("gloo", 64, 16),
    ],
)
async def test_two_hundred_queued_handoffs_need_no_memory_beside_the_pools(
    tmp_path: Path, connector: str, prefill_block: int, decode_block: int
) -> None:
    path = save_shape(tmp_path / "wide", **WIDE)
    rng = random.Random(0)
    # Small chunks, so that what a step needs for itself is small beside what is looked for.
    options = ("--load-format", "dummy", "--connector", connector, "--prefill-chunk", "64")
    with running_ring(
        tmp_path,
        model=str(path),
        options=options,
        prefill_options=pool_of(prefill_block),
        decode_options=pool_of(decode_block),
        router_options=("--max-inflight", str(2 * REQUESTS)),  # they are to queue on the workers
    ) as ring:
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
    assert max(grown.values()) <= MAX_GROWTH >> 20, f"MB beyond the pool: {grown}"
