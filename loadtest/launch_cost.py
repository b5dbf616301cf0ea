"""The host's share of a launch, with triton's own launch and with a bound one: no device is needed.

    python -m loadtest.launch_cost [--rounds 2000]

Launches go up to the call of the driver, which does nothing here and takes some 2 us on a device. The two
kinds alternate; the medians of batches are shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from baton_kernels.cuda.launch import BoundKernel
from loadtest.kernels import Launch, head_launches, row_launches
from loadtest.stubbed_driver import Stub, stubbed

BATCH = 50


@dataclass(frozen=True)
class Recorded:
    """A launch with all its arguments."""

    kernel: BoundKernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def bound(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants)

    def by_triton(self) -> None:
        self.kernel.kernel[self.grid](*self.args, **self.constants)

    @property
    def name(self) -> str:
        return str(self.kernel.kernel.fn.__name__).strip("_")


def recorded(run: Callable[[], object]) -> list[Recorded]:
    """The launches that ``run`` makes; they are made."""
    found: list[Recorded] = []
    launch: Any = BoundKernel._launch

    def remembered(self: BoundKernel, grid: Any, *args: Any, **constants: Any) -> object:
        found.append(Recorded(self, grid, args, constants))
        return launch(self, grid, *args, **constants)

    with patch.object(BoundKernel, "_launch", remembered):
        run()
    return found


def all_launches() -> list[Recorded]:
    """A launch of each kernel, over the shapes of an 8B Llama."""
    wanted: list[Launch] = [*head_launches("bfloat16", (128,)), *row_launches("bfloat16")]
    return [one for launch in wanted for one in recorded(partial(launch.run, 90))]


def microseconds(kinds: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The median time of each of ``kinds``, which take turns."""
    taken: list[list[float]] = [[] for _ in kinds]
    for _ in range(rounds // BATCH):
        for kind, times in zip(kinds, taken, strict=True):
            began = time.perf_counter()
            for _ in range(BATCH):
                kind()
            times.append((time.perf_counter() - began) / BATCH * 1e6)
    return [median(times) for times in taken]


def measure(stub: Stub, rounds: int) -> Table:
    table = Table("kernel", "triton's launch, us", "bound, us", "times", title="host time of a launch")
    for launch in all_launches():
        before = stub.launches
        plain, bound = microseconds([launch.by_triton, launch.bound], rounds)
        assert stub.launches - before == 2 * (rounds // BATCH) * BATCH
        table.add_row(launch.name, f"{plain:.1f}", f"{bound:.1f}", f"{plain / bound:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with stubbed() as stub:
        Console(width=100).print(measure(stub, args.rounds))


if __name__ == "__main__":
    main()
