"""Prompts whose blocks went to host memory and come back, beside computing them, and the rate of a copy from
pinned memory."""

from __future__ import annotations

import torch

from baton.engine.engine import Engine
from loadtest.gpu.bench import Bench
from loadtest.gpu.driving import drive, params, sequences
from loadtest.gpu.model import engine_config

RATE, TABLE = "Copies between host and device", "Prompts through the host tier"
COPIED = 1 << 30


def measure(bench: Bench) -> None:
    """Ask for prompts one after the other, more than the pool holds, then for the same ones again."""
    copies(bench)
    scale = bench.scale
    count, length = scale.tier_prompts
    blocks = length // scale.block_size
    config = engine_config(
        bench,
        length + scale.block_size,
        4,
        kv_cache_bytes=None,
        num_blocks=max(2, count // 2) * blocks + 2,
        prefix_caching=True,
        host_kv_bytes=(count + 2) * blocks * block_bytes(bench),
    )
    engine = Engine.from_config(config)
    before = engine.stats().host_tier.copied
    saved, restored = before.saved, before.restored
    for turn in ("new", "again"):
        seconds = 0.0
        for number in range(count):
            seconds += drive(engine, sequences(engine, 1, length, params(1), seed=number)).seconds
        after = engine.stats().host_tier.copied
        moved = {"saved, MB": (after.saved - saved) / 1e6, "restored, MB": (after.restored - restored) / 1e6}
        rate = (after.restored - restored) / seconds / 1e9
        saved, restored = after.saved, after.restored
        times = {"a prompt, ms": seconds / count * 1e3, "restored, GB/s": rate}
        bench.results.row(TABLE, asked=turn, prompts=count, tokens=length, **times, **moved)
    engine.close()


def block_bytes(bench: Bench) -> int:
    """Return the bytes of one block of the model that is measured."""
    from loadtest.shapes import SHAPES

    shape = {k: v for k, v in SHAPES[bench.scale.model].items() if isinstance(v, int)}
    dim = shape["hidden_size"] // shape["num_attention_heads"]
    numbers = shape["num_key_value_heads"] * shape["num_hidden_layers"] * 2 * bench.scale.block_size * dim
    return numbers * bench.dtype.itemsize


def copies(bench: Bench) -> None:
    """Measure what the link between host and device gives at best."""
    size = COPIED if bench.on_cuda else 1 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=bench.on_cuda)
    device = torch.empty(size, dtype=torch.uint8, device=bench.device)
    to_host = bench.seconds(lambda: host.copy_(device, non_blocking=True))
    to_device = bench.seconds(lambda: device.copy_(host, non_blocking=True))
    rates = {"to host, GB/s": size / to_host / 1e9, "to device, GB/s": size / to_device / 1e9}
    bench.results.row(RATE, pinned=bench.on_cuda, **rates)
