"""The tile sizes of the kernels of latent attention, by the sizes of latents and heads and by type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.cuda.shapes import MIN_ARCH, MIN_ROWS, Device, next_power_of_two
from baton_kernels.cuda.tuned import Tiling

LARGEST_VALUE = 512
"""Most numbers of a latent that values are made of: a program's sums are as wide."""
LARGEST_REST = 128
"""Most numbers behind them."""
LARGEST_KEY = 256
"""Most dimensions of an expanded key or value."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A vector in two parts, each padded to a size that a tile can have, as 576 is none: 512 and 64."""

    first: int
    """Numbers of the first part."""
    rest: int
    """Numbers of the second; 0: there is none."""

    @property
    def padded(self) -> tuple[int, int]:
        return padded(self.first), padded(self.rest) if self.rest else 0


def padded(numbers: int) -> int:
    return max(16, next_power_of_two(numbers))


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The properties that the kernels of latent attention are compiled for.

    The sums of 32 rows of 512 numbers are a quarter of a multiprocessor's registers, and the tensor cores
    take their queries out of registers, too: it has room for one such program. With 64 rows a few registers
    are spilled.
    """

    block_size: int
    width: int
    """Numbers of a latent."""
    heads: int
    """Query heads."""
    dtype: torch.dtype
    arch: int

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"latents of {self.dtype}: allowed are float32, bfloat16 and float16")
        if self.arch < MIN_ARCH:
            raise ValueError(f"compute capability is {self.arch / 10}: at least {MIN_ARCH / 10}")

    @classmethod
    def of(cls, view: Tensor, heads: int, device: Device) -> LatentShape:
        _, _, _, _, block_size, width = view.shape
        if view.stride()[-2:] != (width, 1):
            raise ValueError(f"a block's latents must lie behind each other, not {view.stride()} apart")
        return cls(block_size, width, heads, view.dtype, device.arch)

    @property
    def exact(self) -> bool:
        """Whether products are exact: see ``Shape.exact``."""
        return self.dtype == torch.float32

    @property
    def precision(self) -> str:
        return "ieee" if self.exact else "tf32"

    @property
    def most_rows(self) -> int:
        """Most rows (queries times heads) of a tile of absorbed queries."""
        if self.exact:
            return MIN_ROWS
        return 32 if self.width > 256 + LARGEST_REST else 64

    @property
    def tile(self) -> int:
        """Latents of a tile."""
        return 16 if self.exact else 32

    @property
    def chunk_queries(self) -> int:
        """Queries of a piece of an absorbed chunk: as many as a tile has rows for, and at least one."""
        return max(1, self.most_rows // self.heads)

    def parts(self, value_dim: int) -> Parts:
        """A latent's parts: what values are made of, and the rest. ValueError for sizes that do not fit."""
        rest = self.width - value_dim
        if not 0 < value_dim <= LARGEST_VALUE or not 0 <= rest <= LARGEST_REST:
            raise ValueError(
                f"latents of {self.width} numbers, {value_dim} of them for values: at most {LARGEST_VALUE}, "
                f"and {LARGEST_REST} behind them"
            )
        return Parts(value_dim, rest)

    def row_tiles(self, queries: int) -> int:
        """Tiles that hold the rows of a sequence of so many queries."""
        return -(-queries * self.heads // self.absorbed(queries).rows)

    def absorbed(self, queries: int) -> Tiling:
        """The tiling of sequences of so many queries."""
        rows = min(self.most_rows, max(MIN_ROWS, next_power_of_two(queries * self.heads)))
        return Tiling(rows, self.tile, warps=8, stages=2 if self.exact else 5)

    def expanded(self, parts: Parts, value_dim: int) -> Tiling:
        """The tiling of chunks whose keys and values are expanded. ``parts``: those of a key."""
        most = max(sum(parts.padded), padded(value_dim))
        if parts.first > LARGEST_KEY or value_dim > LARGEST_KEY:
            raise ValueError(
                f"expanded keys of {parts.first + parts.rest} and values of {value_dim} dimensions: at most "
                f"{LARGEST_KEY}"
            )
        if self.exact:
            return Tiling(64 if most <= 64 else 32 if most <= 128 else 16, 16, warps=8, stages=2)
        if self.arch >= 90:
            return Tiling(128, 64 if most <= 192 else 32, warps=8, stages=3)
        return Tiling(128 if most <= 128 else 64, 32, warps=8, stages=3)


def key_parts(dim: int) -> Parts:
    """The parts of a key of ``dim`` dimensions: the first is the largest power of two in it."""
    first = 1 << (dim.bit_length() - 1)
    return Parts(first, dim - first) if first >= 16 else Parts(dim, 0)
