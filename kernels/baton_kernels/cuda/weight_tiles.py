"""Tiles of weights as they lie in memory, read as numbers: plain ones, and codes with scales.

A weight has rows of codes and rows of groups, both behind each other. A group's scale and zero point are
applied as its codes are read; what all of a row share (``row_factors``) is left to the end of the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.codes import e2m1_values, e4m3_values, e8m0_values, small_values
from baton_kernels.quantized import QuantizedWeight

FP8_ARCH = 89
"""The first compute capability, times ten, with instructions for fp8."""
WHOLE_ROW = 0
"""Stands for the size of groups that are whole rows."""
LEAST_DEPTH = 16
"""The least inputs of a tile that the tensor cores multiply."""

ScaleKind = Literal["number", "e4m3", "e8m0"]
_SCALES: Mapping[torch.dtype, ScaleKind] = MappingProxyType(
    {
        torch.float32: "number",
        torch.bfloat16: "number",
        torch.float16: "number",
        torch.float8_e4m3fn: "e4m3",
        torch.float8_e8m0fnu: "e8m0",
    }
)


@triton.jit
def scale_values(scales: tl.tensor, SCALE: tl.constexpr) -> tl.tensor:
    """Scales as they were loaded -> float32."""
    if SCALE == "e4m3":
        values = e4m3_values(scales)
    elif SCALE == "e8m0":
        values = e8m0_values(scales)
    else:
        values = scales.to(tl.float32)
    return values


@triton.jit
def code_values(codes: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Codes, one in a byte -> the float32 that they stand for, those of int4 0 to 15."""
    if FORMAT == "int4":
        values = small_values(codes)
    elif FORMAT == "fp4":
        values = e2m1_values(codes)
    elif FORMAT == "fp8 by bits":
        values = e4m3_values(codes)
    elif FORMAT == "fp8":
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(FORMAT == "int8")
        values = codes.to(tl.float32)
    return values


@triton.jit
def load_codes(
    codes: tl.tensor,
    rows: tl.tensor,
    at: tl.tensor,
    INPUTS: tl.constexpr,
    FORMAT: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """The codes of inputs ``at ...`` of rows that begin at ``rows`` [COLUMNS] int64: [COLUMNS, DEPTH], 0
    beyond the last input. Of plain weights, their numbers."""
    PACKED: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "fp4" else 1
    depth = tl.arange(0, DEPTH // PACKED)
    places = codes + rows[:, None] + depth[None, :] + at // PACKED
    if INPUTS % DEPTH == 0:
        loaded = tl.load(places)
    else:
        loaded = tl.load(places, mask=(at // PACKED + depth < INPUTS // PACKED)[None, :], other=0)
    if PACKED == 2:
        loaded = tl.interleave(loaded & 15, loaded >> 4)
    return loaded


@triton.jit
def _of_groups(
    numbers: tl.tensor,
    groups: tl.tensor,
    at: tl.tensor,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """One number for each group: [COLUMNS, groups of the tile], or [COLUMNS, 1] of a tile that is within a
    group."""
    if GROUP == 0:
        found = tl.load(numbers + groups)[:, None]
    elif GROUP >= DEPTH:
        found = tl.load(numbers + groups + at // GROUP)[:, None]
    else:
        of_tile = at // GROUP + tl.arange(0, DEPTH // GROUP)
        places = numbers + groups[:, None] + of_tile[None, :]
        if INPUTS % DEPTH == 0:
            found = tl.load(places)
        else:
            found = tl.load(places, mask=(of_tile < INPUTS // GROUP)[None, :], other=0)
    return found


@triton.jit
def load_weights(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    rows: tl.tensor,
    groups: tl.tensor,
    at: tl.tensor,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """The weights of inputs ``at ...`` of some rows, [COLUMNS, DEPTH], without ``row_factors``: float32, or
    plain ones as they are. Finite beyond the last input.

    ``rows``, ``groups`` [COLUMNS] int64: where the rows' codes and groups begin."""
    loaded = load_codes(codes, rows, at, INPUTS, FORMAT, DEPTH)
    if FORMAT != "plain":
        loaded = _with_scales(
            code_values(loaded, FORMAT), scales, zeros, groups, at,
            INPUTS, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
        )  # fmt: skip
    return loaded


@triton.jit
def _with_scales(
    values: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    groups: tl.tensor,
    at: tl.tensor,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """The values of codes with their groups' zero points and scales."""
    PARTS: tl.constexpr = DEPTH // GROUP if GROUP > 0 and GROUP < DEPTH else 1
    values = tl.reshape(values, [COLUMNS, PARTS, DEPTH // PARTS])
    if HAS_ZEROS:
        values -= _of_groups(zeros, groups, at, INPUTS, GROUP, DEPTH).to(tl.float32)[:, :, None]
    elif FORMAT == "int4":
        values -= 8.0
    if GROUP > 0:
        values *= scale_values(_of_groups(scales, groups, at, INPUTS, GROUP, DEPTH), SCALE)[:, :, None]
    return tl.reshape(values, [COLUMNS, DEPTH])


@triton.jit
def groups_of(rows: tl.tensor, INPUTS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """The first group of each of the rows with the numbers ``rows``."""
    return rows * (INPUTS // GROUP if GROUP else 1)


@triton.jit
def row_factors(
    scales: tl.tensor,
    factors: tl.tensor,
    rows: tl.tensor,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
) -> tl.tensor:
    """The float32 by which the products of rows with the numbers ``rows`` are multiplied, in their shape."""
    found = tl.full(rows.shape, 1.0, tl.float32)
    if FORMAT != "plain" and GROUP == 0:
        found *= scale_values(tl.load(scales + rows), SCALE)
    if HAS_FACTORS:
        found *= tl.load(factors + rows)
    return found


@dataclass(frozen=True, slots=True)
class WeightOperand:
    """A weight [..., rows, inputs] as kernels take it."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Codes (or plain weights), scales, zero points and row factors, or what stands in their places."""
    strides: tuple[int, int]
    """The distances from expert to expert and from row to row, in elements of the first of ``tensors``."""
    format: str
    group: int
    scale: ScaleKind
    has_zeros: bool
    has_factors: bool

    @classmethod
    def of(cls, weight: QuantizedWeight | Tensor, arch: int) -> WeightOperand:
        """ValueError for parts that are strided, and for groups of sizes that tiles do not fit."""
        if isinstance(weight, Tensor):
            strides = (weight.stride(0) if weight.dim() > 2 else 0, weight.stride(-2))
            return cls((weight,) * 4, strides, "plain", WHOLE_ROW, "number", False, False)
        return _operand(weight, arch)

    @property
    def constants(self) -> dict[str, object]:
        """What kernels of such weights are compiled for."""
        return {
            "GROUP": self.group,
            "FORMAT": self.format,
            "SCALE": self.scale,
            "HAS_ZEROS": self.has_zeros,
            "HAS_FACTORS": self.has_factors,
        }

    def depth(self, most: int) -> int:
        """The inputs of a tile, at most ``most``, a power of two: whole groups, or a part of one that divides
        it."""
        return fitting_depth(self.group, most)


def in_code_order(x: Tensor, weight: QuantizedWeight | Tensor) -> Tensor:
    """x [T, inputs] with its columns in the order of the weight's codes; x itself where that is its own."""
    if isinstance(weight, Tensor) or weight.order is None:
        return x
    return x.index_select(1, weight.order)


def fitting_depth(group: int, most: int) -> int:
    """See ``WeightOperand.depth``; ``group`` may be ``WHOLE_ROW``."""
    if group == WHOLE_ROW:
        return most
    lowest_bit = group & -group
    return most if group == lowest_bit and group <= most else min(most, lowest_bit)


def _operand(weight: QuantizedWeight, arch: int) -> WeightOperand:
    parts = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros, "factors": weight.factors}
    for name, part in parts.items():
        if part is not None and not part.is_contiguous():
            raise ValueError(f"{name} of a quantized weight must be contiguous, not {part.stride()} apart")
    kind = _SCALES.get(weight.scales.dtype)
    if kind is None:
        allowed = ", ".join(str(dtype) for dtype in _SCALES)
        raise ValueError(f"scales are {weight.scales.dtype}; allowed: {allowed}")
    group = WHOLE_ROW if weight.scales.shape[-1] == 1 else weight.group
    if group != WHOLE_ROW and group % LEAST_DEPTH:
        raise ValueError(f"groups are of {group} inputs; allowed: whole rows, and multiples of {LEAST_DEPTH}")
    codes = weight.codes.view(torch.uint8) if weight.format == "fp8" else weight.codes
    scales = weight.scales if kind == "number" else weight.scales.view(torch.uint8)
    tensors = (
        codes,
        scales,
        codes if weight.zeros is None else weight.zeros,
        scales if weight.factors is None else weight.factors,
    )
    return WeightOperand(
        tensors,
        (codes.stride(0) if codes.dim() > 2 else 0, codes.stride(-2)),
        "fp8 by bits" if weight.format == "fp8" and arch < FP8_ARCH else weight.format,
        group,
        kind,
        weight.zeros is not None,
        weight.factors is not None,
    )
