"""The cost of a prompt that is asked again after the pool evicted its KV blocks: with a host tier and
without.

    python -m loadtest.host_tier [--tokens 500,2000] [--repeats 5] [--threads 1] [--role both|ring]

Two servers of the same random model of 126 million parameters in float32, whose pools hold little more than
one prompt; one has a host tier. Each prompt is asked for, others push it out, and it is asked for again, of
one server and the other in turns, each request alone. Ratios are of medians within one run. The server itself
reports how many tokens were not computed, and the worker's metrics how many blocks came back.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.handoff import BLOCK_SIZE, LLAMA, MODEL, VOCAB, num_parameters
from tests.support.clients import RingClient
from tests.support.ring import Ring, running_ring
from tests.support.tiny_models import save_shape

HOST_MEMORY = "512MiB"
NEW_TOKENS = 2
ROLES = ("both", "ring")


@dataclass
class Samples:
    """One server's samples: the times to the first token, in seconds, of new prompts and of repeated ones,
    and the tokens of the repeated ones that were not computed."""

    new: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


async def ask(client: RingClient, prompt: list[int]) -> tuple[float, int]:
    answer = await client.stream(prompt, max_tokens=NEW_TOKENS, temperature=0)
    return answer.arrivals[0], answer.cached_tokens


async def in_turns(rings: Mapping[str, Ring], tokens: int, repeats: int) -> dict[str, Samples]:
    """Return the samples by server. Every request is a new prompt or, behind it, the prompt before once
    more."""
    rng = random.Random(tokens)
    samples = {name: Samples() for name in rings}
    clients = {name: RingClient(ring.url, MODEL) for name, ring in rings.items()}
    before: list[int] | None = None
    for number in range(-1, repeats + 1):
        prompt = [rng.randrange(2, VOCAB) for _ in range(tokens)]
        order = list(clients.items())
        for name, client in order if number % 2 else reversed(order):
            new, _ = await ask(client, prompt)
            if before is None:
                continue
            again, cached = await ask(client, before)
            if number > 0:  # the memory of pool and tier is new to the first prompt
                samples[name].new.append(new)
                samples[name].again.append(again)
                samples[name].cached.append(cached)
        before = prompt
    for client in clients.values():
        await client.http.aclose()
    return samples


def restored_blocks(ring: Ring) -> int:
    metrics = [sample for worker in ring.workers for sample in worker.metrics().items()]
    return sum(int(value) for name, value in metrics if name.startswith("baton_host_kv_hit_blocks_total"))


def measure(tmp: Path, model: Path, tokens: int, repeats: int, threads: int, role: str) -> list[list[str]]:
    """Return the rows of the table."""
    num_blocks = tokens // BLOCK_SIZE + 4
    sizes = ("--block-size", str(BLOCK_SIZE), "--num-blocks", str(num_blocks), "--threads", str(threads))
    options = ("--load-format", "dummy", *sizes)
    tier = ("--host-kv-memory", HOST_MEMORY)
    split = int(role == "ring")
    start = partial(running_ring, model=str(model), prefill=split, decode=split, both=1 - split)
    with (
        start(tmp / "tier", options=(*options, *tier)) as with_tier,
        start(tmp / "plain", options=options) as without,
    ):
        rings = {"host tier": with_tier, "none": without}
        samples = asyncio.run(in_turns(rings, tokens, repeats))
        blocks = {name: restored_blocks(ring) for name, ring in rings.items()}
    recomputing = statistics.median(samples["none"].again)
    rows = []
    for name, taken in samples.items():
        again = statistics.median(taken.again)
        times = [f"{statistics.median(taken.new):.3f} s", f"{again:.3f} s", f"{again / recomputing:.3f}"]
        rows.append([str(tokens), name, *times, f"{statistics.median(taken.cached):.0f}", str(blocks[name])])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="2000", help="lengths of the prompts, with commas between them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--role", choices=ROLES, default="both", help="one worker, or prefill and decode")
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"], help="of the random model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        model = save_shape(Path(tmp) / MODEL, **{**LLAMA, "num_hidden_layers": args.layers})
        title = f"{num_parameters(model) / 1e6:.0f} M parameters, {args.role}, medians of {args.repeats}"
        table = Table("prompt", "server", "TTFT, new", "TTFT, evicted and asked again", title=title)
        for column in ("of recomputing", "tokens not computed", "blocks restored in all"):
            table.add_column(column)
        for tokens in map(int, args.tokens.split(",")):
            place = Path(tmp) / str(tokens)
            for row in measure(place, model, tokens, args.repeats, args.threads, args.role):
                table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
