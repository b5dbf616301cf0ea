"""The CPU's kernels against what bounds them, and against the library's.

    python -m loadtest.cpu_kernels [--threads N] [--block-sizes 16,64] [--dtype float32] [--forms fp8,int4]

In bfloat16, or float32 where oneDNN (torch's library) has no instructions for it. Matmul: weights packed,
against oneDNN's with weights packed for that number of rows, in turns; few rows are bound by reading the
weight once, many by the multiplications. The same with quantized weights of the forms of
loadtest.code_weights. Decode attention: pages lie anywhere in the pool; bytes of K and V read over time, and
in turns with it the same over a pool of FP8. Prefill attention: a chunk behind its context, against torch's
of contiguous K and V. Weights and pools are larger than the caches, but for prefill's. Medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.device import has_bfloat16
from baton_kernels.attention import AttentionPlan, new_pool, paged_attention
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.kv_fp8 import FP8
from baton_kernels.paged import Chunk, PagedBatch
from loadtest.code_weights import FORMS, Form

BEYOND_CACHES = 300 << 20
"""The size of memory that the caches of no core hold, in bytes."""
SHAPES = ((768, 2304), (768, 4096), (2048, 768), (896, 9728), (4864, 896), (896, 151_936))
"""(inputs, outputs) of the projections of the models of loadtest.shapes."""
ROWS = (1, 8, 32, 512)
CONTEXTS = (
    (12, 4, 64, 8, 544),
    (12, 4, 64, 32, 544),
    (12, 12, 64, 32, 544),
    (14, 2, 64, 32, 544),
    (32, 8, 128, 8, 2048),
)
"""(heads, KV heads, head size, sequences, tokens of each sequence)."""
CHUNKS = ((12, 4, 64, 256, 2048), (32, 8, 128, 256, 2048), (2, 2, 64, 64, 8000))
"""(heads, KV heads, head size, tokens of the chunk, tokens that its last one sees)."""


def timed(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median time of each call, in seconds, called in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            own.append(time.perf_counter() - began)
    return [statistics.median(own[1:]) for own in times]


def read_bandwidth(beyond: int = BEYOND_CACHES) -> float:
    """Return the bandwidth of summing ``beyond`` bytes of memory, in bytes/s."""
    memory = torch.ones(beyond // 8, dtype=torch.int64)
    [seconds] = timed([memory.sum], 7)
    return memory.nbytes / seconds


@dataclass(frozen=True, slots=True)
class Matmul:
    """The times of one shape, in seconds."""

    rows: int
    ours: float
    library: float
    quantized: Sequence[float]
    """The times of our kernel with quantized weights."""


def matmuls(
    inputs: int, outputs: int, dtype: torch.dtype, forms: Sequence[Form], beyond: int
) -> Iterator[Matmul]:
    """Yield the times for each number of ``ROWS``. ``beyond``: the bytes of weights that take turns."""
    count = max(1, beyond // (inputs * outputs * dtype.itemsize))
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    ours = cycle(_there(PackedWeight.of(weight) for weight in weights))
    in_forms = [cycle(packed(form, outputs, inputs, dtype, beyond)) for form in forms]
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        theirs = cycle([torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights])
        calls: list[Callable[[], Tensor]] = [
            times(ours, x),
            lambda: torch.ops.mkldnn._linear_pointwise(x, next(theirs), None, "none", [], ""),  # noqa: B023 - called before x changes
        ]
        calls += [times(weights, x) for weights in in_forms]
        own, library, *quantized = timed(calls, max(7, count))
        yield Matmul(rows, own, library, quantized)


def times(weights: Iterator[PackedWeight], x: Tensor) -> Callable[[], Tensor]:
    """Return a call that multiplies x with the next of the weights."""
    return lambda: next(weights).multiply(x)


def packed(form: Form, outputs: int, inputs: int, dtype: torch.dtype, beyond: int) -> list[PackedWeight]:
    """Return weights of this form that together have ``beyond`` bytes, or one."""
    first = form.random(outputs, inputs)
    weights = (form.random(outputs, inputs) for _ in range(beyond // first.nbytes))
    return _there(PackedWeight.of(weight, dtype=dtype) for weight in (first, *weights))


def _there(weights: Iterable[PackedWeight | None]) -> list[PackedWeight]:
    return [weight for weight in weights if weight is not None]


def decode(
    heads: int, kv_heads: int, dim: int, rows: int, context: int, block_size: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the bandwidth of reading K and V, in bytes/s, and how many times as fast it is over FP8."""
    layers = 12
    blocks = -(-context // block_size)
    pool = new_pool(
        blocks * rows,
        kv_heads,
        layers,
        block_size,
        dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool.normal_()
    tables = torch.randperm(blocks * rows).view(rows, blocks)
    positions = torch.full((rows,), context - 1)
    batch = PagedBatch(
        positions, tables[:, -1].contiguous(), positions % block_size, rows, tables, positions + 1, chunks=()
    )
    q = torch.randn(rows, heads, dim).to(dtype)

    def attend(pool: Tensor) -> Callable[[], Tensor]:
        plan = CpuPlan.build(batch, pool)
        assert plan is not None
        whole, layer = AttentionPlan(plan), cycle(range(layers))
        return lambda: paged_attention(pool, next(layer), q, whole, scale=dim**-0.5, window=None)

    seconds, over_fp8 = timed([attend(pool), attend(pool.to(FP8))], 4 * layers)
    return rows * context * kv_heads * dim * 2 * dtype.itemsize / seconds, seconds / over_fp8


def prefill(
    heads: int, kv_heads: int, dim: int, length: int, context: int, dtype: torch.dtype
) -> list[float]:
    """Return our operations/s, and torch's."""
    size = 16
    blocks = -(-context // size)
    pool = new_pool(blocks, kv_heads, 1, size, dim, dtype=dtype, device=torch.device("cpu"))
    pool.normal_()
    table, positions = torch.randperm(blocks), torch.arange(context - length, context)
    chunks = (Chunk(0, length, context, table),)
    none = torch.empty(0, dtype=torch.int64)
    slots = table[positions // size], positions % size
    plan = CpuPlan.build(PagedBatch(positions, *slots, 0, none.view(0, 0), none, chunks), pool)
    assert plan is not None
    whole, q = AttentionPlan(plan), torch.randn(length, heads, dim).to(dtype)
    k, v = (pool[table, :, 0, i].permute(1, 0, 2, 3).reshape(1, kv_heads, -1, dim) for i in range(2))
    k, v, turned = k[:, :, :context], v[:, :, :context], q.permute(1, 0, 2)[None]
    sees = positions[:, None] >= torch.arange(context)
    seconds = timed(
        [
            lambda: paged_attention(pool, 0, q, whole, scale=dim**-0.5, window=None),
            lambda: scaled_dot_product_attention(turned, k, v, attn_mask=sees, enable_gqa=True),
        ],
        9,
    )
    return [4 * int(sees.sum()) * heads * dim / each for each in seconds]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of how much is measured, ``shapes`` and ``megabytes``."""
    parser.add_argument("--shapes", type=int, help="the first so many of each table; default: all")
    parser.add_argument(
        "--megabytes", type=int, default=BEYOND_CACHES >> 20, help="of weights: more than the caches hold"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--forms", default="int8,fp8,int4", help=f"any of {', '.join(FORMS)}")
    parser.add_argument("--block-sizes", default="16,64", help="of KV blocks, in tokens")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16" if has_bfloat16() else "float32"
    )
    add_sizes(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    beyond: int = chosen.megabytes << 20
    console = Console(width=120)
    console.print(f"memory read: {read_bandwidth(beyond) / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    numbers: str = chosen.dtype
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[numbers]
    table = Table(title=f"matmul, {numbers}", title_justify="left")
    columns = ("inputs x outputs", "rows", "us", "GB/s", "GFLOP/s", "oneDNN us", "ratio")
    names = chosen.forms.split(",")
    for column in (*columns, *(part for name in names for part in (f"{name} us", "speed-up"))):
        table.add_column(column, justify="right")
    with torch.inference_mode():
        for inputs, outputs in SHAPES[: chosen.shapes]:
            for found in matmuls(inputs, outputs, dtype, [FORMS[name] for name in names], beyond):
                rows, size = found.rows, inputs * outputs
                table.add_row(
                    f"{inputs} x {outputs}",
                    str(rows),
                    f"{found.ours * 1e6:.0f}",
                    f"{size * dtype.itemsize / found.ours / 1e9:.1f}",
                    f"{2 * rows * size / found.ours / 1e9:.0f}",
                    f"{found.library * 1e6:.0f}",
                    f"{found.ours / found.library:.2f}",
                    *(
                        part
                        for each in found.quantized
                        for part in (f"{each * 1e6:.0f}", f"{found.ours / each:.2f}")
                    ),
                )
    console.print(table)
    sizes = [int(size) for size in chosen.block_sizes.split(",")]
    table = Table(title=f"decode attention, {numbers}: GB/s by tokens of a block", title_justify="left")
    told = [column for size in sizes for column in (str(size), "over FP8")]
    for column in ("heads/KV heads/size", "sequences", "tokens of each", *told):
        table.add_column(column, justify="right")
    for heads, kv_heads, dim, rows, context in CONTEXTS[: chosen.shapes]:
        rates = [decode(heads, kv_heads, dim, rows, context, size, dtype) for size in sizes]
        shape = f"{heads}/{kv_heads}/{dim}"
        told = [cell for rate, gain in rates for cell in (f"{rate / 1e9:.1f}", f"x {gain:.2f}")]
        table.add_row(shape, str(rows), str(context), *told)
    console.print(table)
    table = Table(title=f"prefill attention, {numbers}", title_justify="left")
    for column in ("heads/KV heads/size", "chunk", "context", "GFLOP/s", "torch's", "of it"):
        table.add_column(column, justify="right")
    for heads, kv_heads, dim, length, context in CHUNKS[: chosen.shapes]:
        ours, theirs = prefill(heads, kv_heads, dim, length, context, dtype)
        rates_told = (f"{ours / 1e9:.0f}", f"{theirs / 1e9:.0f}", f"{ours / theirs:.2f}")
        table.add_row(f"{heads}/{kv_heads}/{dim}", str(length), str(context), *rates_told)
    console.print(table)


if __name__ == "__main__":
    main()
