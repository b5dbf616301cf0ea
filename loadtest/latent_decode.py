"""The CPU's kernel of absorbed decode attention (MLA) against what bounds it.

    python -m loadtest.latent_decode [--threads N] [--dtype float32] [--rounds N]

Rows of 2,048 tokens whose latents of all layers are larger than the caches: each is to be read once for all
heads. Few heads are bound by reading memory, many by multiplying: a head needs 2 * (width + value_dim)
operations for each latent. The kernel, a sum over as much memory and a matmul of packed weights take turns;
medians. "bound" is the lesser of both limits, and "of bound" the share of it that is reached.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from itertools import cycle

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from baton.engine.device import has_bfloat16
from baton_kernels.cpu.latent import CpuLatentPlan
from baton_kernels.cpu.library import advise_large_pages
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.latent import LatentPlan
from baton_kernels.paged import PagedBatch
from loadtest.cpu_kernels import BEYOND_CACHES, timed

WIDTHS = ((576, 512), (288, 256))
"""(width, value_dim): DeepSeek's, MiniCPM3's and half of Mistral Small 4's."""
HEADS = (2, 4, 8, 16, 32)
"""Query heads of a rank."""
ROWS = (1, 8)
CONTEXT = 2048
BLOCK_SIZE = 16
MATMUL = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine does in a second."""

    bytes_read: float
    operations: float

    def bytes_per_second(self, operations_per_byte: float) -> float:
        """The most bytes that can be read and worked on."""
        return min(self.bytes_read, self.operations / operations_per_byte)


def batch_of(rows: int) -> PagedBatch:
    """Decoding rows of the full context, in shuffled blocks."""
    blocks = CONTEXT // BLOCK_SIZE
    tables = torch.randperm(rows * blocks).view(rows, blocks)
    last = torch.full((rows,), CONTEXT - 1)
    return PagedBatch(last, tables[:, -1].clone(), last % BLOCK_SIZE, rows, tables, last + 1, ())


def pool_of(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Latents of so many layers that they are larger than the caches."""
    blocks = rows * CONTEXT // BLOCK_SIZE
    layers = max(2, -(-BEYOND_CACHES // (blocks * BLOCK_SIZE * width * dtype.itemsize)))
    pool = torch.empty((blocks, 1, layers, 1, BLOCK_SIZE, width), dtype=dtype)
    advise_large_pages(pool)
    return pool.normal_()


def measured(rows: int, heads: int, pool: Tensor, value_dim: int, rounds: int) -> tuple[float, float, Limits]:
    """The kernel's bytes/s and operations/s, and the machine's limits meanwhile."""
    dtype, width, batch = pool.dtype, pool.shape[-1], batch_of(rows)
    plan = LatentPlan.build(batch, pool, heads)
    if not isinstance(plan.step, CpuLatentPlan):
        raise SystemExit("there are no kernels for this CPU")
    q, layers = torch.randn(rows, heads, width).to(dtype), cycle(range(pool.shape[2]))
    memory = torch.ones(BEYOND_CACHES // 8, dtype=torch.int64)
    weight = PackedWeight.of(torch.randn(MATMUL, MATMUL).to(dtype))
    assert weight is not None, "kernels that attend also multiply"
    x = torch.randn(MATMUL, MATMUL).to(dtype)

    def attend() -> Tensor:
        return plan.attend(pool, next(layers), q, scale=width**-0.5, value_dim=value_dim)

    ours, summed, multiplied = timed([attend, memory.sum, lambda: weight.multiply(x)], rounds)
    latents = rows * CONTEXT
    return (
        latents * width * dtype.itemsize / ours,
        2 * latents * heads * (width + value_dim) / ours,
        Limits(memory.nbytes / summed, 2 * MATMUL**3 / multiplied),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16" if has_bfloat16() else "float32"
    )
    parser.add_argument("--rounds", type=int, default=24)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[chosen.dtype]
    table = Table(title=f"{chosen.dtype}, {CONTEXT} tokens, {chosen.threads} threads", title_justify="left")
    limits = ("memory GB/s", "of memory", "matmul GFLOP/s", "bound GB/s", "of bound")
    for column in ("latent", "rows", "heads", "GB/s", "GFLOP/s", *limits):
        table.add_column(column, justify="right")
    with torch.inference_mode():
        for width, value_dim in WIDTHS:
            for rows in ROWS:
                pool = pool_of(rows, width, dtype)
                for heads in HEADS:
                    read, operations, most = measured(rows, heads, pool, value_dim, chosen.rounds)
                    bound = most.bytes_per_second(operations / read)
                    table.add_row(
                        str(width),
                        str(rows),
                        str(heads),
                        f"{read / 1e9:.1f}",
                        f"{operations / 1e9:.0f}",
                        f"{most.bytes_read / 1e9:.1f}",
                        f"{read / most.bytes_read:.2f}",
                        f"{most.operations / 1e9:.0f}",
                        f"{bound / 1e9:.1f}",
                        f"{read / bound:.2f}",
                    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
