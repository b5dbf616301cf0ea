"""A worker of role ``both`` and a router, over HTTP, in closed loops of several sizes."""

from __future__ import annotations

from loadtest.gpu.bench import Bench
from loadtest.gpu.results import Value
from loadtest.shapes import SHAPES, save_unfilled
from loadtest.turns import Load, ask_loop
from tests.support.ring import running_ring

TABLE = "Served"
ROUNDS = 2
"""Requests of each load, for each that runs at a time."""
LEAST_S = 12.0
"""The seconds that must be left for another load."""


def measure(bench: Bench) -> None:
    """Ask with each number of requests at a time, after a few tokens that are not counted."""
    scale = bench.scale
    path = save_unfilled(bench.tmp / "served", SHAPES[scale.model])
    chunk = 2048 if bench.on_cuda else 64
    options = {
        "--device": str(bench.device),
        "--load-format": "dummy",
        "--block-size": str(scale.block_size),
        "--max-num-seqs": str(max(scale.batches)),
        "--max-num-batched-tokens": str(4 * chunk),
        "--prefill-chunk": str(chunk),
        "--kv-cache-memory": str(scale.kv_bytes),
        "--max-model-len": str(scale.input_len + scale.output_len + scale.block_size),
    }
    flags = [part for option in options.items() for part in option]
    with running_ring(
        bench.tmp / "ring", model=str(path), prefill=0, decode=0, both=1, dtype=scale.dtype, options=flags
    ) as ring:
        for concurrency in scale.batches:
            if bench.left < min(LEAST_S, bench.limit / 4):
                bench.results.missing(f"{concurrency} at a time", "the time of this part was over")
                continue
            warm_up = Load(scale.input_len, 2, concurrency, concurrency)
            ask_loop(path, warm_up, ring.url, seed=10_000)
            load = Load(scale.input_len, scale.output_len, concurrency, ROUNDS * concurrency)
            found: dict[str, Value] = dict(ask_loop(path, load, ring.url, seed=1))
            lengths = f"{scale.input_len}/{scale.output_len}"
            bench.results.row(TABLE, **{"at a time": concurrency, "in/out": lengths, **found})
