"""The targets, and whether the results reach them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.gpu.results import Found, Record


@dataclass(frozen=True)
class Target:
    """One figure that a run is judged by."""

    name: str
    part: str
    """The part without which it is not known."""
    value: Callable[[Found], float | None]
    """The figure; None if the results do not hold it."""
    wanted: float
    at_least: bool = True

    def verdict(self, found: Found) -> tuple[float | None, str]:
        """Return the figure, and ``reached``, ``missed`` or ``not measured``."""
        value = self.value(found)
        if value is None:
            return None, "not measured"
        reached = value >= self.wanted if self.at_least else value <= self.wanted
        return value, "reached" if reached else "missed"


def number(row: Record, name: str) -> float | None:
    """Return a figure of a row; None if it has none."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def figure(part: str, table: str, name: str, **where: object) -> Callable[[Found], float | None]:
    """Return a function that reads one figure: of the first row in which the other columns are as told."""

    def read(found: Found) -> float | None:
        for row in found.rows(part, table):
            if all(row.get(column) == value for column, value in where.items()):
                return number(row, name)
        return None

    return read


def least(part: str, table: str, name: str) -> Callable[[Found], float | None]:
    """Return a function that reads the least figure of a column."""

    def read(found: Found) -> float | None:
        values = [number(row, name) for row in found.rows(part, table)]
        return min((value for value in values if value is not None), default=None)

    return read


def most(part: str, table: str, name: str) -> Callable[[Found], float | None]:
    """Return a function that reads the greatest figure of a column."""

    def read(found: Found) -> float | None:
        values = [number(row, name) for row in found.rows(part, table)]
        return max((value for value in values if value is not None), default=None)

    return read


def failures(part: str) -> Callable[[Found], float | None]:
    """Return a function that reads how many tests failed, if any ran."""

    def read(found: Found) -> float | None:
        rows = found.rows(part, "Tests")
        ran = any(number(row, "passed") or number(row, "failed") for row in rows)
        return most(part, "Tests", "failed")(found) if ran else None

    return read


def over_forward(rows: int) -> Callable[[Found], float | None]:
    """Return a function that reads how much longer an engine's step takes than forward pass and draw alone,
    as a share; with overlap, where the engine has it."""

    def read(found: Found) -> float | None:
        alone = figure("decode", "Decode step", "replayed, ms", rows=rows, context=1024, sampling="greedy")
        wanted = {"rows": rows, "sampling": "greedy"}
        steps = [row for row in found.rows("offline", "Engine steps") if wanted.items() <= row.items()]
        own = [value for row in steps if (value := number(row, "p50, ms")) is not None]
        forward = alone(found)
        return None if forward is None or not own else min(own) / forward - 1

    return read


DECODE = {1: 0.80, 16: 0.80, 64: 0.80, 256: 0.75}
"""The share of the copy's rate that forward pass and draw must reach, by rows."""
HANDOFFS = ("tcp", "ucx", "nixl", "nccl")
TARGETS = (
    *(
        Target(
            f"decode step of {rows} x 1,024: share of a copy's rate",
            "decode",
            figure("decode", "Decode step", "of a copy", rows=rows, context=1024, sampling="greedy"),
            wanted,
        )
        for rows, wanted in DECODE.items()
    ),
    *(
        Target(
            f"engine step at {rows} rows: longer than forward pass and draw by",
            "offline",
            over_forward(rows),
            0.04,
            at_least=False,
        )
        for rows in DECODE
    ),
    Target(
        "prompt of 8,192: share of a matmul's rate",
        "prompt",
        figure("prompt", "Prompt", "of a matmul", tokens=8192),
        0.72,
    ),
    Target(
        "attention: rate as a share of the best other, the worst of all cases",
        "attention",
        least("attention", "Attention of one layer", "of the best other"),
        0.9,
    ),
    *(
        Target(
            f"handoff over {kind}, both engines busy: share of the link's rate",
            f"handoff-{kind}",
            most(f"handoff-{kind}", "Both engines busy", "of the link"),
            0.85,
        )
        for kind in HANDOFFS
    ),
    *(
        Target(
            f"handoff over {kind}: the decoding side's steps longer by",
            f"handoff-{kind}",
            most(f"handoff-{kind}", "Both engines busy", "steps longer by"),
            0.03,
            at_least=False,
        )
        for kind in HANDOFFS
    ),
    Target(
        "kernels compiled after the engine was ready",
        "offline",
        most("offline", "Compilations after ready", "kernels"),
        0,
        at_least=False,
    ),
    Target(
        "bfloat16 answers: error beside the CPU's, times the CPU's own",
        "correctness",
        most("correctness", "Log-probabilities in bfloat16", "times the CPU's error"),
        1.5,
        at_least=False,
    ),
    Target(
        "tests on the device that failed",
        "kernel-tests",
        failures("kernel-tests"),
        0,
        at_least=False,
    ),
    Target(
        "tests of the ring on the device that failed",
        "cuda-tests",
        failures("cuda-tests"),
        0,
        at_least=False,
    ),
)
