"""The gain of batching, the prefix cache and chunked prefill, on the demo model and this machine.

    python -m loadtest.first_light

Every row is a ratio of two figures taken in one run, in turns, each the median of ``--rounds`` rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.clients import Answer, RingClient
from tests.support.ring import Ring, running_ring

VOCAB = 4000
GREEDY = {"temperature": 0}
NEW_TOKENS = 128


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def ttft(answer: Answer) -> float:
    return answer.arrivals[0]


def worst_gap(answer: Answer, since: float) -> float:
    """Return the longest wait between two deliveries after ``since``, in seconds."""
    pairs = zip(answer.arrivals, answer.arrivals[1:], strict=False)
    return max((later - earlier for earlier, later in pairs if later >= since), default=0.0)


async def batching(client: RingClient, rng: random.Random, streams: int) -> tuple[float, float]:
    """Return the tokens/s of ``streams`` concurrent requests, and of a few of them one at a time."""
    prompts = [prompt_of(rng, rng.randint(8, 200)) for _ in range(streams)]
    few = prompts[: max(4, streams // 16)]
    fields = {"max_tokens": NEW_TOKENS, **GREEDY}
    began = time.perf_counter()
    for prompt in few:
        await client.stream(prompt, **fields)
    alone = NEW_TOKENS * len(few) / (time.perf_counter() - began)
    began = time.perf_counter()
    await asyncio.gather(*(client.stream(prompt, **fields) for prompt in prompts))
    return NEW_TOKENS * streams / (time.perf_counter() - began), alone


async def shared_prefix(client: RingClient, rng: random.Random) -> tuple[float, float, int]:
    """Return the TTFT of the second and of the first request with one prefix of 1,500 tokens, and the
    second's hits."""
    prefix = prompt_of(rng, 1500)
    first = await client.stream([*prefix, *prompt_of(rng, 20)], max_tokens=4, **GREEDY)
    second = await client.stream([*prefix, *prompt_of(rng, 20)], max_tokens=4, **GREEDY)
    return ttft(second), ttft(first), second.cached_tokens


async def disturbance(client: RingClient, rng: random.Random) -> float:
    """Return the longest gap in 8 running streams while a prompt of 3,000 tokens is prefilled beside them, in
    seconds."""
    running = [
        asyncio.create_task(client.stream(prompt_of(rng, 16), max_tokens=400, **GREEDY)) for _ in range(8)
    ]
    await asyncio.sleep(1.0)
    await client.stream(prompt_of(rng, 3000), max_tokens=2, **GREEDY)
    answers = await asyncio.gather(*running)
    # The first half second holds the streams' own prefills.
    return max(worst_gap(answer, since=0.5) for answer in answers)


@contextmanager
def rings(tmp: Path) -> Iterator[tuple[Ring, Ring, Ring]]:
    """Start a ring of 1P1D, and workers of role ``both`` with and without chunked prefill."""
    whole = ("--no-chunked-prefill",)
    with (
        running_ring(tmp / "split", kv_cache_memory=None) as split,
        running_ring(tmp / "chunked", prefill=0, decode=0, both=1, kv_cache_memory=None) as chunked,
        running_ring(
            tmp / "whole", prefill=0, decode=0, both=1, options=whole, kv_cache_memory=None
        ) as unchunked,
    ):
        yield split, chunked, unchunked


async def measure(rounds: int, streams: int, seed: int) -> Table:
    rng = random.Random(seed)
    table = Table(
        "measurement", "median", "against", "ratio", "target", title="First light, demo model, fp32"
    )
    with tempfile.TemporaryDirectory() as tmp, rings(Path(tmp)) as (split, chunked, unchunked):
        async with RingClient(split.url, "demo") as client:
            await batching(client, rng, 4)  # warms up
            rates = [await batching(client, rng, streams) for _ in range(rounds)]
            prefixes = [await shared_prefix(client, rng) for _ in range(rounds)]
        async with RingClient(chunked.url, "demo") as with_, RingClient(unchunked.url, "demo") as without:
            gaps = [(await disturbance(with_, rng), await disturbance(without, rng)) for _ in range(rounds)]
    together, alone = (statistics.median(column) for column in zip(*rates, strict=True))
    speedup = statistics.median(t / a for t, a in rates)
    table.add_row(
        f"1P1D, {streams} streams",
        f"{together:.0f} tok/s",
        f"{alone:.0f} tok/s alone",
        f"{speedup:.2f}",
        ">= 4",
    )
    second, first, _ = (statistics.median(column) for column in zip(*prefixes, strict=True))
    saved = statistics.median(s / f for s, f, _ in prefixes)
    hits = min(hit for *_, hit in prefixes)
    table.add_row(
        f"TTFT, {hits} tokens cached",
        f"{second * 1e3:.0f} ms",
        f"{first * 1e3:.0f} ms cold",
        f"{saved:.2f}",
        "<= 0.5",
    )
    small, large = (statistics.median(column) for column in zip(*gaps, strict=True))
    calm = statistics.median(s / b for s, b in gaps)
    table.add_row(
        "worst gap, chunked", f"{small * 1e3:.0f} ms", f"{large * 1e3:.0f} ms whole", f"{calm:.2f}", "< 0.35"
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    Console().print(asyncio.run(measure(args.rounds, args.streams, args.seed)))


if __name__ == "__main__":
    main()
