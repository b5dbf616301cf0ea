"""The CPU's kernels of Mamba-2 layers: decoding against the bandwidth of memory, prompts in operations.

    python -m loadtest.mamba_decode [--threads N]

A token of a decoding sequence is bound by its states, each read and written once, which together are larger
than the caches: beside their bytes/s is what adding a number to memory in place reads and writes, measured in
turns. A chunk of a prompt is bound by its multiplications. Medians.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from itertools import cycle

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from baton_kernels.causal_conv import ConvWeights
from baton_kernels.kv_layout import KVGroup, StateKV
from baton_kernels.mamba import gated_norm, mamba
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.mamba_weights import GatedNorm, MambaWeights
from baton_kernels.paged import StateRows, StateSegment
from baton_kernels.state_pages import LayerStates
from loadtest.cpu_kernels import BEYOND_CACHES, timed

SHAPES = {
    "Nemotron 3 Nano": MambaSizes(units=8, heads=8, head_dim=64, groups=8, state_dim=128, conv_kernel=4),
    "Granite 4 H tiny": MambaSizes(units=8, heads=6, head_dim=64, groups=1, state_dim=128, conv_kernel=4),
    "Falcon-H1 0.5B": MambaSizes(units=8, heads=3, head_dim=64, groups=1, state_dim=128, conv_kernel=4),
}
SEQUENCES = (1, 8, 32)
CHUNKS = (16, 128, 1024)
ROUNDS = 12


def weights_of(sizes: MambaSizes) -> MambaWeights:
    heads, channels = sizes.units * sizes.heads, sizes.units * sizes.unit_channels
    conv = ConvWeights(torch.randn(sizes.conv_kernel, channels) * 0.3, torch.randn(channels))
    return MambaWeights(conv, torch.rand(heads), torch.randn(heads), torch.randn(heads), (0.0, float("inf")))


class States:
    """States of sequences, a page each, that together are larger than the caches."""

    def __init__(self, sizes: MambaSizes) -> None:
        size = sizes.state_size + sizes.unit_channels * (sizes.conv_kernel - 1)
        self.bytes = sizes.units * size * 4
        count = max(2 * max(SEQUENCES), 2 * BEYOND_CACHES // self.bytes)
        group = KVGroup(StateKV(sizes.units, size), (0,), range(1), sizes.units)
        self.layer = LayerStates(torch.full((count, sizes.units * size), 0.01), group, 0)
        self._next = cycle(torch.randperm(count).tolist())

    def decode(self, sequences: int) -> StateRows:
        """The next sequences, whose states are written in place."""
        pages = torch.tensor([[next(self._next)] for _ in range(sequences)])
        return StateRows(pages, pages, ())

    def chunk(self, length: int) -> StateRows:
        page, none = torch.tensor([next(self._next)]), torch.zeros((0, 1), dtype=torch.int64)
        return StateRows(none, none, (StateSegment(0, length, page, page),))


def rows_of(name: str, sizes: MambaSizes) -> list[list[str]]:
    """Return the rows of the table of one shape. The bandwidth of memory is measured in between."""
    memory = torch.ones(BEYOND_CACHES // 4)
    states, weights, found = States(sizes), weights_of(sizes), []
    norm = GatedNorm(torch.randn(sizes.inner), 1e-5, sizes.groups, sizes.inner // sizes.groups, True)
    heads = sizes.units * sizes.heads
    for tokens, is_chunk in [*((n, False) for n in SEQUENCES), *((n, True) for n in CHUNKS)]:
        projected = torch.randn(tokens, sizes.columns)
        y, gate = torch.randn(tokens, sizes.inner), projected[:, : sizes.inner]
        rows = cycle([(states.chunk if is_chunk else states.decode)(tokens) for _ in range(64)])

        def layer() -> Tensor:
            return mamba(projected, weights, sizes, states.layer, next(rows))  # noqa: B023 - called at once

        # Memory's turn leaves the caches without code and weights, which the first call fetches.
        calls: list[Callable[[], object]] = [
            lambda: memory.add_(1.0),
            layer,
            layer,
            lambda: gated_norm(y, gate, norm, torch.bfloat16),  # noqa: B023
        ]
        added, _, taken, normed = timed(calls, ROUNDS)
        bandwidth = 2 * memory.nbytes / added
        moved = 2 * states.bytes * (1 if is_chunk else tokens)
        # What the chunked form takes of each head and token, besides B times C, which heads share.
        flops = tokens * heads * 2 * (2 * sizes.head_dim * sizes.state_dim + 32 * sizes.head_dim)
        found.append(
            [
                name,
                f"{'chunk of ' if is_chunk else ''}{tokens}",
                f"{taken * 1e6:.0f}",
                "" if is_chunk else f"{moved / taken / 1e9:.1f}",
                f"{bandwidth / 1e9:.1f}",
                f"{flops / taken / 1e9:.0f}" if is_chunk else "",
                f"{normed * 1e6:.0f}",
            ]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    console = Console(width=120)
    console.print(f"{torch.get_num_threads()} threads")
    table = Table(title="Mamba-2 layers", title_justify="left")
    for column in ("layer of", "tokens", "us", "GB/s", "memory GB/s", "GFLOP/s", "norm us"):
        table.add_column(column, justify="right")
    with torch.inference_mode():
        for name, sizes in SHAPES.items():
            for row in rows_of(name, sizes):
                table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
