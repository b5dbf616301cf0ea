"""The CPU's kernels of experts against what bounds them, and against an MLP of the size of those chosen.

    python -m loadtest.cpu_experts [--threads N] [--dtype float32] [--form int8]

Few tokens are bound by reading the chosen experts' weights once, which lie in memory larger than the caches;
many by the multiplications, like the dense MLP, which has the inner rows of the experts of one token and so
computes as much. Each call chooses anew. Medians.
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

from baton.engine.device import has_bfloat16
from baton_kernels.activation import SILU
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.routing import route
from baton_kernels.routing_rule import Routing
from loadtest.code_weights import FORMS, Form
from loadtest.cpu_kernels import add_sizes, read_bandwidth, timed

SHAPES = ((8, 768, 256, 2), (128, 1024, 384, 8))
"""(experts, hidden, inner, experts of a token)."""
TOKENS = (1, 8, 32, 512)
CHOICES = 16
"""Choices of experts that take turns."""
ROUNDS = 32


def packed_experts(
    experts: int, hidden: int, inner: int, dtype: torch.dtype, form: Form | None, beyond: int
) -> list[PackedExperts]:
    """Return layers of experts that together have ``beyond`` bytes, or one."""
    count = max(1, beyond // (3 * experts * hidden * inner * dtype.itemsize))
    made = []
    for _ in range(count):
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        gate_up, down = (_weight(shape, dtype, form) for shape in shapes)
        made.append(PackedExperts.of(gate_up, down, activation=SILU, dtype=dtype))
    return [each for each in made if each is not None]


def packed_mlps(
    hidden: int, inner: int, dtype: torch.dtype, form: Form | None, beyond: int
) -> list[tuple[PackedWeight, PackedWeight]]:
    """Return MLPs that together have ``beyond`` bytes, or one."""
    made = []
    for _ in range(max(1, beyond // (3 * hidden * inner * dtype.itemsize))):
        both, last = (_weight((1, *shape), dtype, form) for shape in ((2 * inner, hidden), (hidden, inner)))
        gate_up = PackedWeight.of(_first(both), gated=True, dtype=dtype, activation=SILU)
        down = PackedWeight.of(_first(last), dtype=dtype)
        if gate_up is not None and down is not None:
            made.append((gate_up, down))
    return made


def _weight(shape: tuple[int, ...], dtype: torch.dtype, form: Form | None) -> Tensor | QuantizedWeight:
    return (torch.randn(shape) * 0.05).to(dtype) if form is None else form.random(*shape)


def _first(weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    return weight.of_expert(0) if isinstance(weight, QuantizedWeight) else weight[0]


def rows_of(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, form: Form | None, bandwidth: float, beyond: int
) -> list[list[str]]:
    """Return a row of the table for each number of ``TOKENS``. ``bandwidth``: of reading memory, in bytes/s;
    ``beyond``: the bytes of weights that take turns."""
    experts, hidden, inner, top_k = sizes
    routing = Routing(top_k, renormalize=True)
    ours = cycle(packed_experts(experts, hidden, inner, dtype, form, beyond))
    dense = cycle(packed_mlps(hidden, top_k * inner, dtype, form, beyond))
    one = _weight((64, hidden), dtype, form)
    bytes_of_one = one.nbytes / (64 * hidden)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden).to(dtype)
        logits = cycle([torch.randn(tokens, experts) for _ in range(CHOICES)])
        choices = [route(next(logits), routing) for _ in range(CHOICES)]
        taken, touched = cycle(choices), [len(set(chosen.flatten().tolist())) for chosen, _ in choices]

        def of_one_mlp() -> Tensor:
            gate_up, down = next(dense)
            return down.multiply(gate_up.multiply(x))  # noqa: B023 - called before x changes

        calls: list[Callable[[], object]] = [
            lambda: next(ours).multiply(x, *next(taken), False),  # noqa: B023
            of_one_mlp,
            lambda: route(next(logits), routing),  # noqa: B023
        ]
        mixed, whole, routed = timed(calls, ROUNDS)
        mean = sum(touched) / len(touched)
        read = mean * 3 * hidden * inner * bytes_of_one
        rows.append(
            [
                f"{experts} of {hidden} x {inner}, {top_k}",
                str(tokens),
                f"{mean:.0f}",
                f"{mixed * 1e6:.0f}",
                f"{read / bandwidth * 1e6:.0f}",
                f"{read / mixed / 1e9:.1f}",
                f"{6 * tokens * top_k * hidden * inner / mixed / 1e9:.0f}",
                f"{whole * 1e6:.0f}",
                f"{routed * 1e6:.0f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16" if has_bfloat16() else "float32"
    )
    parser.add_argument("--form", choices=FORMS, help="of the weights; default: those of the type")
    add_sizes(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    beyond: int = chosen.megabytes << 20
    console = Console(width=120)
    bandwidth = read_bandwidth(beyond)
    console.print(f"memory read: {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[chosen.dtype]
    table = Table(
        title=f"experts, {chosen.dtype}{f', {chosen.form}' if chosen.form else ''}", title_justify="left"
    )
    columns = ("experts, of a token", "tokens", "touched", "us", "to read, us", "GB/s", "GFLOP/s")
    for column in (*columns, "dense us", "route us"):
        table.add_column(column, justify="right")
    with torch.inference_mode():
        for sizes in SHAPES[: chosen.shapes]:
            for row in rows_of(sizes, dtype, FORMS.get(chosen.form), bandwidth, beyond):
                table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
