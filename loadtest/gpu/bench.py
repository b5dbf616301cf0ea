"""What all parts share: the device and its best rates, the sizes, and the file of results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loadtest.gpu.results import Results
from loadtest.gpu.scale import Scale


@dataclass(frozen=True)
class Roof:
    """The device's best rates."""

    bytes_per_s: float
    """The bytes that a copy reads and writes in a second."""
    flops: float


@dataclass(frozen=True)
class Bench:
    """The device that is measured, the sizes, and where the results go."""

    device: torch.device
    scale: Scale
    tmp: Path
    """A folder of this part's own."""
    results: Results
    limit: float
    """The seconds after which the part is ended."""
    dry: bool = False
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, results: Results, scale: Scale, tmp: Path, limit: float, *, dry: bool) -> Bench:
        """Make the device's context, before any library looks for one, and the part's folder."""
        tmp.mkdir(parents=True, exist_ok=True)
        device = torch.device("cpu" if dry else "cuda:0")
        if not dry:
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        return cls(device, scale, tmp, results, limit, dry)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.scale.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def left(self) -> float:
        """Return the seconds until the part is ended."""
        return self.began + self.limit - time.monotonic()

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of a call, in seconds. On CUDA the second-level cache is emptied before each
        call."""
        if self.on_cuda:
            from triton.testing import do_bench

            return float(do_bench(run, return_mode="median")) / 1000
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def roof(self) -> Roof:
        """Measure the rates of a copy of 512 MiB, and of a matmul of 8192 x 8192 matrices of random
        numbers."""
        source = torch.empty((1 << 29) if self.on_cuda else (1 << 20), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copying = self.seconds(lambda: target.copy_(source))
        size = 8192 if self.on_cuda else 64
        a, b = torch.randn(2, size, size, device=self.device).to(self.dtype)
        return Roof(2 * source.numel() / copying, 2 * size**3 / self.seconds(lambda: a @ b))
