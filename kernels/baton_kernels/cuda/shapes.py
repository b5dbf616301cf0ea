"""How large the tiles of the attention kernels are, by head size and type of the pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton_kernels.cuda.tuned import Tiling, TuningError, tilings_of

LARGEST_HEAD_DIM = 256
LARGEST_GROUP = 64
LEAST_ARCH = 80
LEAST_ROWS = 16
"""A tensor core multiplies 16 rows at a time, so fewer are padded."""


@dataclass(frozen=True, slots=True)
class Device:
    """What the kernels want to know of a device."""

    processors: int
    """Its multiprocessors."""
    arch: int
    """Compute capability: 80 is an A100, 90 an H100 or H200."""
    name: str = ""
    """As its driver has it; empty: nothing was tuned on it."""

    @classmethod
    def of(cls, device: torch.device) -> Device:
        properties = torch.cuda.get_device_properties(device)
        arch = properties.major * 10 + properties.minor
        return cls(properties.multi_processor_count, arch, properties.name)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the attention kernels are compiled for.

    Tiles are as large as registers and shared memory allow without spilling, which
    ``python -m loadtest.kernels --compile`` shows. Of ``stages`` the compiler takes every second for the
    block table, through which keys are found: 5 stages keep two tiles of keys and values under way, 3 one.
    """

    block_size: int
    head_dim: int
    dtype: torch.dtype
    arch: int
    tuned: Mapping[str, Tiling] = field(default_factory=dict)
    """What goes before the tiles chosen here, by :meth:`name`."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"a pool of {self.dtype}: allowed are float32, bfloat16 and float16")
        if self.head_dim > LARGEST_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}: at most {LARGEST_HEAD_DIM}")
        if self.arch < LEAST_ARCH:
            raise ValueError(f"compute capability is {self.arch / 10}: at least {LEAST_ARCH / 10}")

    @classmethod
    def of(cls, pool: Tensor, device: Device) -> Shape:
        block_size, head_dim = pool.shape[-2:]
        if pool.stride()[-3:] != (block_size * head_dim, head_dim, 1):
            raise ValueError(f"the K and V of a block must lie behind each other, not {pool.stride()} apart")
        return cls(block_size, head_dim, pool.dtype, device.arch, tilings_of(device.name))

    @property
    def dims(self) -> int:
        """head_dim, padded to what a tile can have."""
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
    def decode_tile(self) -> int:
        """Keys per tile of the decoding rows."""
        tile = 64 if self.dims <= 128 else 32
        return tile // 2 if self.exact else tile

    def name(self, kernel: str, group: int, chosen: Tiling) -> str:
        """Of a kernel for this shape, whose tiling is ``chosen`` where none is tuned."""
        return (
            f"{kernel} of {chosen.rows} rows, head_dim {self.head_dim}, group {group}, blocks of "
            f"{self.block_size}, {str(self.dtype).removeprefix('torch.')}, arch {self.arch}"
        )

    def decode(self, group: int) -> Tiling:
        """``group``: query heads for each KV head."""
        chosen = self.untuned_decode(group)
        tuned = self.tuned.get(self.name("decode", group, chosen), chosen)
        if (tuned.rows, tuned.tile) != (chosen.rows, chosen.tile):  # the plan of a step is made for these
            raise TuningError(
                f"decode is tuned to {tuned.rows} rows and tiles of {tuned.tile}; allowed: {chosen.rows} and "
                f"{chosen.tile}"
            )
        return tuned

    def prefill(self, group: int, longest: int) -> Tiling:
        """``longest``: queries of the longest chunk. Speculation sends chunks of a few."""
        chosen = self.untuned_prefill(group, longest)
        tuned = self.tuned.get(self.name("prefill", group, chosen), chosen)
        if tuned.rows < group:
            raise TuningError(f"prefill is tuned to {tuned.rows} rows; allowed: at least {group}, the group")
        return tuned

    def untuned_decode(self, group: int) -> Tiling:
        _check_group(group)
        rows = max(LEAST_ROWS, next_power_of_two(group))
        if self.exact:
            return Tiling(rows, self.decode_tile, warps=4 if self.dims <= 128 else 8, stages=3)
        return Tiling(rows, self.decode_tile, warps=4 if rows == LEAST_ROWS else 8, stages=5)

    def untuned_prefill(self, group: int, longest: int) -> Tiling:
        _check_group(group)
        if self.exact:
            rows = 64 if self.dims <= 64 or group > 32 else 32
            if self.dims <= 64:
                return Tiling(rows, 32, warps=8, stages=3)
            return Tiling(rows, 16, warps=8, stages=2)
        if longest * group <= LEAST_ROWS:
            return Tiling(LEAST_ROWS, self.decode_tile, warps=4 if self.dims <= 128 else 8, stages=5)
        # From 9.0 on the tensor cores read their operands from shared memory. Before, they take registers.
        large = self.arch >= 90
        tile = 64 if large and self.dims <= 128 else 32
        if longest * group <= 64 or not (large or self.dims <= 128):
            return Tiling(64, tile, warps=4 if self.dims <= 128 else 8, stages=3)
        return Tiling(128, tile, warps=8, stages=5 if self.dims <= 128 else 3)


def _check_group(group: int) -> None:
    if group > LARGEST_GROUP:
        raise ValueError(f"{group} query heads for each KV head: at most {LARGEST_GROUP}")


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def base_two(scale: float, softcap: float | None) -> tuple[float, float]:
    """Scale and soft-cap with log2(e) in them, as ``tiles.accumulate`` wants them; no cap is an unused 1."""
    log2_e = math.log2(math.e)
    return scale * log2_e, 1.0 if softcap is None else softcap * log2_e
