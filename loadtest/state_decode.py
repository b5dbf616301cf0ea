"""Layers of linear attention on a CPU against what bounds them.

    python -m loadtest.state_decode [--threads N] [--dtype float32]

Decode reads and writes each head's state once, beside the bandwidth of doing so with memory in order: states
lie anywhere in pages, larger than the caches. Prompts are bound by multiplications, those of the recurrence:
a product of the state with the key, one with the query, and an update; beside a matmul of float32 with packed
weights, and plain torch, which computes chunks. Medians of calls in turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from baton.engine.device import has_bfloat16
from baton_kernels import delta_plain
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.delta_rule import linear_attention
from baton_kernels.kv_layout import KVGroup, StateKV
from baton_kernels.paged import StateRows, StateSegment
from baton_kernels.state_pages import LayerStates
from loadtest.cpu_kernels import BEYOND_CACHES, read_bandwidth, timed

HEADS = (("gated delta net", 16, 32), ("Kimi delta attention", 32, 32), ("gated delta net", 4, 4))
"""(kind, key heads, value heads), of 128 numbers each."""
DIM = 128
SEQUENCES = (1, 4, 16, 64)
PROMPT = 512
ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Paged:
    """A layer over the states of many sequences, which together are larger than the caches."""

    layer: DeltaLayer
    by_channel: bool
    states: LayerStates
    tables: Tensor
    """[states, pages of a state]."""

    @classmethod
    def of(cls, kind: str, key_heads: int, value_heads: int) -> Paged:
        """Return a layer with random weights; its pages hold two cells each, in a random order."""
        by_channel = kind.startswith("Kimi")
        channels = (2 * key_heads + value_heads) * DIM
        layer = DeltaLayer(
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=DIM,
            value_dim=DIM,
            a_log=torch.zeros(value_heads),
            dt_bias=torch.randn(value_heads * (DIM if by_channel else 1)),
            conv=torch.randn(4, channels),
            query_scale=DIM**-0.5,
            norm=torch.ones(DIM),
            eps=1e-6,
        )
        size = layer.shared * DIM * DIM + layer.taps * layer.unit_channels
        count = max(2 * max(SEQUENCES), BEYOND_CACHES // (4 * size * key_heads))
        pages = torch.zeros((count * key_heads // 2 + 1, 2 * size))
        group = KVGroup(StateKV(key_heads, size), (0,), range(key_heads // 2), 2)
        tables = torch.randperm(count * key_heads // 2).view(count, -1)
        return cls(layer, by_channel, LayerStates(pages, group, 0), tables)

    def inputs(self, tokens: int, dtype: torch.dtype) -> DeltaInputs:
        """Return random inputs of so many tokens."""
        layer = self.layer
        heads = layer.value_heads
        decays = heads * (DIM if self.by_channel else 1)
        sizes = [layer.key_heads * layer.unit_channels, decays, heads, heads * DIM]
        qkv, decay, beta, gate = torch.randn(tokens, sum(sizes)).to(dtype).split_with_sizes(sizes, dim=1)
        return DeltaInputs(qkv, decay, beta, gate)

    @property
    def state_bytes(self) -> int:
        """The bytes of one sequence's state in the layer."""
        return 4 * self.states.kv.units * self.states.kv.size


def update_bandwidth() -> float:
    """Return the bandwidth of changing memory in place, in bytes/s read and written."""
    memory = torch.ones(BEYOND_CACHES // 4)
    [seconds] = timed([lambda: memory.mul_(0.5)], 7)
    return 2 * memory.nbytes / seconds


def decode_rows(paged: Paged, dtype: torch.dtype, bandwidth: float) -> list[list[str]]:
    """Return a row of the table for each number of ``SEQUENCES``, each of which decodes a token in place."""
    rows = []
    for sequences in SEQUENCES:
        inputs = paged.inputs(sequences, dtype)
        whole = len(paged.tables) // sequences * sequences
        groups = paged.tables[:whole].view(-1, sequences, paged.tables.shape[1])
        steps = cycle([StateRows(tables, tables, ()) for tables in groups])

        def step() -> Tensor:
            return linear_attention(paged.layer, inputs, paged.states, next(steps))  # noqa: B023

        [seconds] = timed([step], ROUNDS)
        moved = 2 * sequences * paged.state_bytes
        rows.append(
            [
                str(sequences),
                f"{seconds * 1e6:.0f}",
                f"{moved / bandwidth * 1e6:.0f}",
                f"{moved / seconds / 1e9:.1f}",
                f"{moved / seconds / bandwidth:.2f}",
            ]
        )
    return rows


def prompt_row(paged: Paged, dtype: torch.dtype) -> list[str]:
    """Return the row of the table about a prompt of ``PROMPT`` tokens."""
    inputs, layer = paged.inputs(PROMPT, dtype), paged.layer
    none = torch.zeros((0, paged.tables.shape[1]), dtype=torch.int64)
    table = paged.tables[0]
    rows = StateRows(none, none, (StateSegment(0, PROMPT, table, table),))
    weight = PackedWeight.of(torch.randn(2048, 2048))
    if weight is None:
        raise SystemExit("the CPU kernels cannot be built here")
    x = torch.randn(PROMPT, 2048)
    calls: list[Callable[[], object]] = [
        lambda: linear_attention(layer, inputs, paged.states, rows),
        lambda: delta_plain.linear_attention(layer, inputs, paged.states, rows),
        lambda: weight.multiply(x),
    ]
    ours, plain, matmul = timed(calls, 5)
    speed = 6 * PROMPT * layer.value_heads * DIM * DIM / ours
    of_matmul = 2 * PROMPT * 2048 * 2048 / matmul
    return [
        f"{ours * 1e3:.1f}",
        f"{speed / 1e9:.0f}",
        f"{of_matmul / 1e9:.0f}",
        f"{speed / of_matmul:.2f}",
        f"{plain * 1e3:.1f}",
    ]


def table_of(title: str, *columns: str) -> Table:
    """Return a table with a first column of kinds."""
    table = Table(title=title, title_justify="left")
    table.add_column("kind, key and value heads")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16" if has_bfloat16() else "float32"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[chosen.dtype]
    console = Console(width=120)
    read, updated = read_bandwidth(), update_bandwidth()
    console.print(
        f"memory read: {read / 1e9:.1f} GB/s, read and written in place: {updated / 1e9:.1f} GB/s, "
        f"{torch.get_num_threads()} threads"
    )
    decode = table_of(f"decode, {chosen.dtype}", "sequences", "us", "to move, us", "GB/s", "share")
    prompt = table_of(f"prompt of {PROMPT}", "ms", "GFLOP/s", "matmul's", "share", "plain torch, ms")
    with torch.inference_mode():
        for kind, keys, values in HEADS:
            paged = Paged.of(kind, keys, values)
            name = f"{kind}, {keys} and {values}"
            for row in decode_rows(paged, dtype, updated):
                decode.add_row(name, *row)
            prompt.add_row(name, *prompt_row(paged, dtype))
    console.print(decode)
    console.print(prompt)


if __name__ == "__main__":
    main()
