"""How often the sampling kernel goes over a row of logits, for usual filters.

    python -m loadtest.draw_passes [--rows 12] [--vocab 128256]

Runs the kernel under triton's interpreter and counts what it loads. The logits are as a language model's: the
probability of a token falls with a power of its rank, steeply in some rows and gently in others. A pass takes
a multiprocessor some microseconds; on many rows at once, each reads them all from memory.

Import this module before any other that imports triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tests.support import interpreted
from tests.support.interpreted import InterpreterBuilder, sampling

FILTERS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "greedy": {"temperature": 0.0},
        "none": {},
        "top-k 20": {"top_k": 20},
        "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
        "top-k 1000": {"top_k": 1000},
        "top-p 0.8": {"top_p": 0.8},
        "top-p 0.95": {"top_p": 0.95},
        "top-p 0.99": {"top_p": 0.99},
        "min-p 0.05": {"min_p": 0.05},
    }
)


@dataclass
class Loads:
    elements: int = 0


@contextmanager
def counting() -> Iterator[Loads]:
    """Count the elements that kernels load within this context."""
    loads = Loads()
    load: Any = InterpreterBuilder.create_masked_load

    def counted(self: object, pointers: object, mask: Any, *args: Any, **kwargs: Any) -> object:
        loads.elements += int(mask.data.sum())
        return load(self, pointers, mask, *args, **kwargs)

    with patch.object(InterpreterBuilder, "create_masked_load", counted):
        yield loads


def like_a_model(vocab: int, generator: torch.Generator) -> Tensor:
    """A row of logits. Exponents from 1.0 to 2.2 make nuclei of 0.95 of some tokens or of thousands."""
    exponent = 1.0 + 1.2 * float(torch.rand((), generator=generator))
    ranks = torch.arange(vocab) + 1.5
    logits = -exponent * ranks.log() + 0.3 * torch.randn(vocab, generator=generator)
    return logits[torch.randperm(vocab, generator=generator)]


def passes(logits: Tensor, filters: Mapping[str, float]) -> float:
    """The number of times that the kernel goes over ``logits`` [V]."""
    settings = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0, **filters}
    column = torch.tensor([*settings.values()], dtype=torch.float64)[:, None]
    with counting() as loads:
        sampling.draw(logits[None].clone(), column, torch.zeros(2, 1, dtype=torch.int64))
    return loads.elements / len(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=128256)
    args = parser.parse_args()
    interpreted.as_on_a_device()
    generator = torch.Generator().manual_seed(1)
    rows = [like_a_model(args.vocab, generator) for _ in range(args.rows)]
    nuclei = [int((row.softmax(0).sort(descending=True).values.cumsum(0) < 0.95).sum()) + 1 for row in rows]
    nuclei.sort()
    title = (
        f"passes over a row of {args.vocab}; tokens in 0.95: {nuclei[len(rows) // 2]}, at most {nuclei[-1]}"
    )
    table = Table("filters", "mean", "median", "most", title=title)
    for name, filters in FILTERS.items():
        found = sorted(passes(row, filters) for row in rows)
        table.add_row(name, f"{mean(found):.1f}", f"{found[len(found) // 2]:.0f}", f"{found[-1]:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
