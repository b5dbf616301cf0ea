"""Activations rounded to eight bits, by themselves or at the end of kernels that have whole rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.codes import e4m3_bits
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.rounded_rows import LARGEST, RoundedRows, RowRounding

FP8_MAX = tl.constexpr(LARGEST["fp8"])
INT8_MAX = tl.constexpr(LARGEST["int8"])


@triton.jit
def store_rounded(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    size: tl.tensor,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Stores a row x [SIZE] float32, 0 from column ``size`` on, as codes and the scales of its groups; if
    HAS_SCALE the number at ``scale`` is that of all."""
    PARTS: tl.constexpr = SIZE // GROUP if GROUP else 1
    part = tl.arange(0, PARTS)
    x = tl.reshape(x, [PARTS, SIZE // PARTS])
    largest: tl.constexpr = FP8_MAX if TYPE == "fp8" else INT8_MAX
    if HAS_SCALE:
        own = tl.full([PARTS], 1.0, tl.float32) * tl.load(scale)
    else:
        peak = tl.max(tl.abs(x), 1)
        own = tl.where(peak == 0.0, 1.0, tl.div_rn(peak, tl.full([PARTS], largest, tl.float32)))
    parts = size // GROUP if GROUP else 1
    tl.store(scales + row * parts + part, own, mask=part < parts)
    x = tl.div_rn(x, tl.broadcast_to(own[:, None], [PARTS, SIZE // PARTS]))
    if TYPE == "fp8":
        found = e4m3_bits(x)
    else:
        x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
        # What a sum with 3 * 2**22 leaves is whole, rounded to the nearest, ties to even.
        found = ((x + 12582912.0) - 12582912.0).to(tl.int8)
    columns = tl.arange(0, SIZE)
    tl.store(codes + row * size + columns, tl.reshape(found, [SIZE]), mask=columns < size)


@bound
@triton.jit(do_not_specialize_on_alignment=["scale"])
def _round_rows(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    own = tl.load(x + row * x_stride + columns, mask=columns < size, other=0.0).to(tl.float32)
    store_rounded(own, codes, scales, scale, row, size, TYPE, GROUP, HAS_SCALE, SIZE)


@dataclass(frozen=True, slots=True)
class RoundedTarget:
    """Memory for rounded rows, and what kernels that fill it are compiled for."""

    codes: Tensor
    """[T, size] int8, or uint8 of fp8."""
    scales: Tensor
    rounding: RowRounding

    @classmethod
    def of(cls, rows: int, size: int, rounding: RowRounding, device: torch.device) -> RoundedTarget:
        """ValueError for groups that no kernel takes."""
        groups = rounding.groups(size)
        if rounding.group and rounding.group != next_power_of_two(rounding.group):
            raise ValueError(f"activations are rounded in groups of {rounding.group}; allowed: powers of two")
        dtype = torch.int8 if rounding.type == "int8" else torch.uint8
        return cls(
            torch.empty((rows, size), dtype=dtype, device=device),
            torch.empty((rows, groups), dtype=torch.float32, device=device),
            rounding,
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and the one scale of all rows, or what stands in its place."""
        scale = self.rounding.scale
        return self.codes, self.scales, self.scales if scale is None else scale

    @property
    def columns(self) -> int:
        """The columns of a program: whole groups, a power of two."""
        return max(next_power_of_two(self.codes.shape[1]), self.rounding.group)

    @property
    def constants(self) -> dict[str, object]:
        return {
            "TYPE": self.rounding.type,
            "GROUP": self.rounding.group,
            "HAS_SCALE": self.rounding.scale is not None,
        }

    @property
    def rows(self) -> RoundedRows:
        """What kernels have stored."""
        return RoundedRows(self.codes.view(self.rounding.dtype), self.scales)


def warps_of(columns: int) -> int:
    """The warps of a program that has a row of so many columns."""
    return min(16, max(1, columns // 512))


def round_rows(x: Tensor, rounding: RowRounding) -> RoundedRows:
    """Does what ``baton_kernels.rounded_rows.round_rows`` does. ValueError if rows are strided."""
    rows, size = x.shape
    if size > 1 and x.stride(1) != 1:
        raise ValueError(f"rows of x must be contiguous, not strided by {x.stride(1)}")
    target = RoundedTarget.of(rows, size, rounding, x.device)
    if rows:
        _round_rows[(rows,)](
            x,
            *target.tensors,
            size,
            x.stride(0) if rows > 1 else size,
            **target.constants,
            SIZE=target.columns,
            num_warps=warps_of(target.columns),
            enable_fp_fusion=True,
        )
    return target.rows
