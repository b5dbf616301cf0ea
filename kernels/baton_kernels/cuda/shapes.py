"""The tile sizes of the attention kernels, by head size and type of the pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from baton_kernels.cuda.tuned import Tiling, TuningError, tilings_of
from baton_kernels.kv_fp8 import FP8
from baton_kernels.window import ChunkedWindow, Window

Number = TypeVar("Number", int, Tensor)
LARGEST_HEAD_DIM = 256
LARGEST_GROUP = 64
MIN_ARCH = 80
MIN_ROWS = 16
"""Fewest rows of a tile: a tensor core multiplies 16 rows at a time, so fewer are padded."""
FEW_NUMBERS = 4096
"""Numbers of a tile of rows beside which shared memory holds three tiles of keys and values."""


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device that the kernels depend on."""

    processors: int
    """The number of multiprocessors."""
    arch: int
    """Compute capability: 80 is an A100, 90 an H100 or H200."""
    name: str = ""
    """The name that the driver gives the device; empty: nothing was tuned on it."""

    @classmethod
    def of(cls, device: torch.device) -> Device:
        properties = torch.cuda.get_device_properties(device)
        arch = properties.major * 10 + properties.minor
        return cls(properties.multi_processor_count, arch, properties.name)


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties that the attention kernels are compiled for.

    Tiles are as large as registers and shared memory allow without spilling, which ``python -m
    loadtest.kernels --compile`` shows. Of ``stages`` the compiler takes every second for the block table,
    through which keys are found: 7 stages have three tiles of keys and values in shared memory, of which two
    are under way while one is multiplied, 5 two, 3 one. Where the tensor cores read their operands from
    shared memory (64 rows and more, from 9.0 on) 5 stages have three tiles.
    """

    block_size: int
    head_dim: int
    dtype: torch.dtype
    """The pool's. Queries have the same or, of a pool of FP8, a type of 16 bits."""
    arch: int
    tuned: Mapping[str, Tiling] = field(default_factory=dict)
    """Tuned tile sizes, which override those chosen here, by :meth:`name`."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16, FP8):
            raise ValueError(f"a pool of {self.dtype}: allowed are float32, bfloat16, float16 and {FP8}")
        if self.head_dim > LARGEST_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}: at most {LARGEST_HEAD_DIM}")
        if self.arch < MIN_ARCH:
            raise ValueError(f"compute capability is {self.arch / 10}: at least {MIN_ARCH / 10}")

    @classmethod
    def of(cls, pool: Tensor, device: Device) -> Shape:
        block_size, head_dim = pool.shape[-2:]
        if pool.stride()[-3:] != (block_size * head_dim, head_dim, 1):
            raise ValueError(f"the K and V of a block must lie behind each other, not {pool.stride()} apart")
        return cls(block_size, head_dim, pool.dtype, device.arch, tilings_of(device.name))

    @property
    def dims(self) -> int:
        """head_dim, padded to a size that a tile can have."""
        return max(16, next_power_of_two(self.head_dim))

    @property
    def exact(self) -> bool:
        """Whether products are float32's own. They are computed outside of the tensor cores, for comparison
        rather than for speed: three passes of tf32 would be as exact, but spill registers."""
        return self.dtype == torch.float32

    @property
    def precision(self) -> str:
        return "ieee" if self.exact else "tf32"

    @property
    def most_rows(self) -> int:
        """Most rows (queries times heads) of a sequence of several queries, for each KV head: they stand in
        one tile of decode."""
        return (64 if self.dims <= 128 else 32) // (2 if self.exact else 1)

    @property
    def splits_prefill(self) -> bool:
        """Whether a tile of prefill's rows may be shared by several programs. With larger heads it leaves no
        registers for that."""
        return self.dims <= 128

    @property
    def decode_tile(self) -> int:
        """Keys per tile of sequences of a few queries."""
        if self.exact:
            return 16
        return 64 if self.dims <= 128 else 32

    def name(self, kernel: str, group: int, chosen: Tiling) -> str:
        """The name of a kernel for this shape, whose tiling is ``chosen`` where none is tuned."""
        return (
            f"{kernel} of {chosen.rows} rows, head_dim {self.head_dim}, group {group}, blocks of "
            f"{self.block_size}, {str(self.dtype).removeprefix('torch.')}, arch {self.arch}"
        )

    def decode(self, group: int, queries: int = 1) -> Tiling:
        """The tiling of sequences of a few queries. ``group``: query heads for each KV head. TuningError if a
        tuned one does not fit."""
        chosen = self.untuned_decode(group, queries)
        tuned = self.tuned.get(self.name("decode", group, chosen), chosen)
        if (tuned.rows, tuned.tile) != (chosen.rows, chosen.tile):  # the step's plan has these sizes
            raise TuningError(
                f"decode is tuned to {tuned.rows} rows and tiles of {tuned.tile}; allowed: {chosen.rows} and "
                f"{chosen.tile}"
            )
        return tuned

    def prefill(self, group: int) -> Tiling:
        """The tiling of chunks that are too long for decode's. TuningError if a tuned one does not fit."""
        chosen = self.untuned_prefill(group)
        tuned = self.tuned.get(self.name("prefill", group, chosen), chosen)
        if tuned.rows < group:
            raise TuningError(f"prefill is tuned to {tuned.rows} rows; allowed: at least {group}, the group")
        return tuned

    def untuned_decode(self, group: int, queries: int = 1) -> Tiling:
        _check_group(group)
        if queries > 1 and group * queries > self.most_rows:
            raise ValueError(f"{queries} queries of {group} heads: at most {self.most_rows} rows together")
        rows = max(MIN_ROWS, next_power_of_two(group * queries))
        if self.exact:
            return Tiling(rows, self.decode_tile, warps=8, stages=3)
        # Codes take registers of their own on their way to numbers.
        most = MIN_ROWS if self.dtype == FP8 and self.dims > 64 else 32
        warps = 4 if rows <= most else 8
        # Three tiles do not fit twice into the shared memory of older devices.
        three = self.arch >= 90 and warps == 4 and rows * self.dims <= FEW_NUMBERS
        return Tiling(rows, self.decode_tile, warps, stages=7 if three else 5)

    def untuned_prefill(self, group: int) -> Tiling:
        _check_group(group)
        if self.exact:
            fewest = 64 if self.dims <= 64 else 32 if self.dims <= 128 else 16
            rows = max(fewest, next_power_of_two(group))
            return Tiling(rows, 16, warps=8, stages=3 if self.dims <= 64 else 2)
        # From 9.0 on the tensor cores read their operands from shared memory. Older ones take registers.
        large = self.arch >= 90
        tile = 64 if large and self.dims <= 128 else 32
        if not (large or self.dims <= 128):
            return Tiling(64, tile // 2 if self.dtype == FP8 else tile, warps=8, stages=3)
        return Tiling(128, tile, warps=8, stages=5 if self.dims <= 128 else 3)


def _check_group(group: int) -> None:
    if group > LARGEST_GROUP:
        raise ValueError(f"{group} query heads for each KV head: at most {LARGEST_GROUP}")


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def window_size(window: Window | None) -> int:
    """The tokens of a window, or of a run of a chunked one, as kernels take them; no window is an unused
    0."""
    return window.size if isinstance(window, ChunkedWindow) else window or 0


def window_start_of(context: Number, window: Window) -> Number:
    """The host's ``tiles.window_start``."""
    if isinstance(window, ChunkedWindow):
        return (context - 1) // window.size * window.size
    return context - window


def base_two(scale: float, softcap: float | None) -> tuple[float, float]:
    """Scale and soft-cap with log2(e) in them, as ``tiles.accumulate`` takes them; no cap is an unused 1."""
    log2_e = math.log2(math.e)
    return scale * log2_e, 1.0 if softcap is None else softcap * log2_e
