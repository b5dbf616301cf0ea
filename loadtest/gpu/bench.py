"""What the measurements share: the device and its roof, the sizes, and the tables that they fill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from loadtest.kernels import BENCHES
from tests.support.paged_steps import Case


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    model: str
    """A name of ``loadtest.shapes.SHAPES``."""
    dtype: torch.dtype
    block_size: int
    batches: Sequence[int]
    contexts: Sequence[int]
    prefill: Sequence[int]
    kv_bytes: int
    """Of the pool that decode steps read; sequences share blocks where it is less than all of theirs."""
    attention: Mapping[str, Case]
    connectors: Sequence[str]
    message_blocks: Sequence[int]
    round_bytes: int
    """That each connector moves, several times."""
    concurrency: Sequence[int]
    input_len: int
    output_len: int


FULL = Scale(
    model="llama-8b",
    dtype=torch.bfloat16,
    block_size=64,
    batches=(1, 16, 64, 256),
    contexts=(1024, 8192),
    prefill=(1024, 8192),
    kv_bytes=32 << 30,
    attention=BENCHES,
    connectors=("ucx", "nccl"),
    message_blocks=(1, 16, 64),
    round_bytes=4 << 30,
    concurrency=(1, 4, 16, 64, 128, 256),
    input_len=1024,
    output_len=128,
)
TINY = Scale(
    model="llama-tiny",
    dtype=torch.float32,
    block_size=16,
    batches=(1, 3),
    contexts=(20, 70),
    prefill=(40,),
    kv_bytes=1 << 20,
    attention=MappingProxyType(
        {
            "decode": Case(4, 2, 16, 16, None, (40, 40), ()),
            "prefill": Case(4, 2, 16, 16, None, (), ((0, 33),)),
        }
    ),
    connectors=("tcp", "gloo"),
    message_blocks=(4,),
    round_bytes=1 << 18,
    concurrency=(1, 2),
    input_len=8,
    output_len=4,
)

TARGETS: Mapping[int, float] = MappingProxyType({1: 0.90, 16: 0.85, 64: 0.80, 256: 0.70})
"""Rows of a decode step -> the share of the bandwidth of a copy that it is to reach."""
PREFILL_TARGET = 0.65
"""The share of a large matmul's rate that a prompt of 8,192 tokens is to reach."""


@dataclass(frozen=True)
class Roof:
    """What the device does at best."""

    bytes_per_s: float
    flops: float


@dataclass(frozen=True)
class Bench:
    """Where it is measured, and how large."""

    device: torch.device
    scale: Scale
    tmp: Path

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of a call. On CUDA with the second-level cache emptied before each."""
        if self.device.type == "cuda":
            from triton.testing import do_bench

            return float(do_bench(run, return_mode="median")) / 1000
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def roof(self) -> Roof:
        """Of a copy of 512 MiB, and of a matmul of 8192 x 8192 matrices."""
        on_cuda = self.device.type == "cuda"
        source = torch.empty((1 << 29) if on_cuda else (1 << 20), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copying = self.seconds(lambda: target.copy_(source))
        size = 8192 if on_cuda else 64
        a, b = torch.randn(2, size, size, device=self.device).to(self.scale.dtype)
        return Roof(2 * source.numel() / copying, 2 * size**3 / self.seconds(lambda: a @ b))


@dataclass
class Section:
    """One table of the report."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *self.notes, *([""] if self.notes else [])]
        if self.rows:
            lines += [_line(self.columns), _line(["---"] * len(self.columns)), *map(_line, self.rows)]
        return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def against(share: float, target: float | None) -> str:
    """A share, and whether it reaches what it should."""
    if target is None:
        return f"{share:.2f}"
    return f"{share:.2f} ({'reaches' if share >= target else 'below'} {target:.2f})"
