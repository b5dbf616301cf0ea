"""Weights as the package compressed-tensors publishes them.

https://github.com/vllm-project/compressed-tensors"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.quantization.gptq import InputGroups
from baton.models.quantization.stored import (
    Blocks,
    ByteScales,
    Codes,
    GroupScales,
    HalfBytes,
    InputScale,
    MatrixShape,
    OneScale,
    StoredTensor,
    StoredWeight,
    TensorForm,
    finite,
)
from baton.models.quantization.weight_spec import WeightSpec


def plain_codes(spec: WeightSpec) -> StoredWeight:
    """A byte for each code (float-quantized, int-quantized, mxfp8-quantized)."""
    dtype = torch.float8_e4m3fn if spec.code == "fp8" else torch.int8
    found = {"weight": StoredTensor("codes", Codes(dtype)), "weight_scale": _scales(spec)}
    if spec.zeros:
        found["weight_zero_point"] = StoredTensor("zeros", ZeroPoints(_blocks(spec)))
    if spec.rounding == "fp8-tensor":
        found["input_scale"] = StoredTensor("input_scale", InputScale())
    return found


def packed_ints(spec: WeightSpec) -> StoredWeight:
    """Whole numbers, above 0 by half their range, in words of 32 bits (pack-quantized)."""
    bits = 4 if spec.code == "int4" else 8
    found = {
        "weight_packed": StoredTensor("codes", PackedInts(bits)),
        "weight_scale": _scales(spec),
    }
    if spec.zeros:
        found["weight_zero_point"] = StoredTensor("zeros", PackedZeroPoints(bits, _blocks(spec)))
    if spec.ordered:
        found["weight_g_idx"] = StoredTensor("groups", InputGroups(spec.group, ordered=True))
    return found


def packed_fp4(spec: WeightSpec) -> StoredWeight:
    """Two codes in a byte (nvfp4-pack-quantized, mxfp4-pack-quantized)."""
    found = {"weight_packed": StoredTensor("codes", HalfBytes()), "weight_scale": _scales(spec)}
    if spec.factors:
        found["weight_global_scale"] = StoredTensor("factors", Divisor())
    return found


def _blocks(spec: WeightSpec) -> Blocks:
    return Blocks(spec.scale_rows, spec.group)


def _scales(spec: WeightSpec) -> StoredTensor:
    match spec.scale_type:
        case "float32":
            return StoredTensor("scales", GroupScales(_blocks(spec)))
        case "fp8":
            return StoredTensor("scales", ByteScales(_blocks(spec), torch.float8_e4m3fn))
        case _:
            return StoredTensor("scales", ByteScales(_blocks(spec), torch.float8_e8m0fnu))


@dataclass(frozen=True)
class ZeroPoints(TensorForm):
    """Zero points of blocks, int8."""

    blocks: Blocks

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return self.blocks.number(matrix)

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return self.blocks.of(found, rows, inputs)


class _Words(TensorForm):
    """Words of 32 bits."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.int32,)


@dataclass(frozen=True)
class PackedInts(_Words):
    """Codes of 4 or 8 bits, [rows, words]: those of low inputs in the low bits."""

    bits: int

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.rows, -(-matrix.inputs * self.bits // 32)))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        codes = found.view(torch.uint8)[rows]
        if self.bits == 4:
            return codes[:, inputs.start // 2 : inputs.stop // 2]
        return _signed(codes[:, inputs.start : inputs.stop])


@dataclass(frozen=True)
class PackedZeroPoints(_Words):
    """Zero points of rows' groups of inputs, [words, groups]: those of low rows in the low bits."""

    bits: int
    blocks: Blocks

    def shape(self, matrix: MatrixShape) -> torch.Size:
        rows, groups = self.blocks.number(matrix)
        return torch.Size((-(-rows * self.bits // 32), groups))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        bit = rows * self.bits
        words = Blocks(1, self.blocks.group).of(found, bit // 32, inputs)
        zeros = (words >> (bit % 32)[:, None] & (1 << self.bits) - 1).to(torch.uint8)
        return zeros if self.bits == 4 else _signed(zeros)


class Divisor(OneScale):
    """A number that scales were multiplied with before they were rounded."""

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        divisor = finite(found.float().reshape(()))
        if not divisor:
            raise ValueError("the scale is 0; allowed: other numbers")
        return 1 / divisor


def _signed(codes: Tensor) -> Tensor:
    """uint8 of numbers that are above 0 by 128 -> int8."""
    return (codes ^ 0x80).view(torch.int8)
