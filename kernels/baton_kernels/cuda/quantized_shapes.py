"""The tile sizes of products with quantized weights, by the sizes of a weight and the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton_kernels.cuda.shapes import MIN_ARCH, MIN_ROWS, Device, next_power_of_two
from baton_kernels.cuda.tuned import Tiling
from baton_kernels.cuda.weight_tiles import WHOLE_ROW, fitting_depth

MOST_FEW = 64
"""Most rows that are multiplied in parts of the inputs, so that all processors read weights."""
MOST_ROWS = 128
"""Most rows of a tile."""
TOKEN_COUNTS = (MIN_ROWS, 32, MOST_FEW, MOST_ROWS)
"""Numbers of tokens that together launch every kernel that any number does."""
PROGRAMS = 4
"""Programs that each processor has with few rows, where there are inputs enough."""
FEWEST_STEPS = 4
"""Fewest tiles of inputs of a part: one is multiplied while others are read."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The properties that products with a weight are compiled for.

    Of a :class:`Tiling`, ``tile`` are outputs: rows of the weight, which is the tensor cores' left operand,
    as that comes out of registers, where codes become numbers."""

    outputs: int
    inputs: int
    group: int
    """The inputs that share a scale; ``weight_tiles.WHOLE_ROW``: all."""
    dtype: torch.dtype
    """The type of what is multiplied: float32, bfloat16, float16, or of eight bits."""
    device: Device

    def __post_init__(self) -> None:
        if self.device.arch < MIN_ARCH:
            raise ValueError(
                f"compute capability is {self.device.arch / 10}; allowed: from {MIN_ARCH / 10} on"
            )

    @property
    def exact(self) -> bool:
        """Whether products are float32's own, outside of the tensor cores."""
        return self.dtype == torch.float32

    def rows(self, tokens: int) -> int:
        """Rows of a tile."""
        return min(MOST_ROWS, max(MIN_ROWS, next_power_of_two(max(1, tokens))))

    def tiling(self, rows: int) -> Tiling:
        """The tiling with tiles of so many rows."""
        if self.exact:
            return Tiling(rows, 64, warps=8, stages=2)
        if rows <= MOST_FEW:
            return Tiling(rows, 64, warps=4, stages=4)
        # Sums of groups of rounded inputs stand in registers beside the sums of all.
        in_parts = self.dtype.itemsize == 1 and self.group != WHOLE_ROW
        return Tiling(rows, 64 if in_parts else 128, warps=8, stages=4 if self.device.arch >= 90 else 3)

    def depth(self, rows: int) -> int:
        """Inputs of a tile: whole groups, or a part of one that divides it."""
        most = 16 if self.exact else 128 if rows <= MOST_FEW or self.dtype.itemsize == 1 else 64
        return fitting_depth(self.group, most)

    def span(self, rows: int) -> int:
        """Inputs that a program multiplies: all of them, or with few rows a part, of whole tiles."""
        depth = self.depth(rows)
        steps = -(-self.inputs // depth)
        if rows > MOST_FEW:
            return steps * depth
        tiles = -(-self.outputs // self.tiling(rows).tile)
        parts = min(-(-PROGRAMS * self.device.processors // tiles), max(1, steps // FEWEST_STEPS))
        return -(-steps // parts) * depth
