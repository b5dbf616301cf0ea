"""Weights as NVIDIA's ModelOpt publishes them: FP8, and NVFP4, which is fp4 in groups whose scales are fp8.

https://nvidia.github.io/Model-Optimizer/"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.quantization.stored import (
    Codes,
    GroupScales,
    MatrixShape,
    OneScale,
    OnlyChecked,
    StoredTensor,
    StoredWeight,
    TensorForm,
    finite,
)
from baton.models.quantization.weight_spec import WeightSpec


def fp8(spec: WeightSpec) -> StoredWeight:
    """The codes, what the codes are multiplied with, and the scale of activations if that is known."""
    found = {
        "weight": StoredTensor("codes", Codes(torch.float8_e4m3fn)),
        "weight_scale": StoredTensor("scales", GroupScales(spec.scale_rows, spec.group)),
    }
    if spec.rounding == "fp8-tensor":
        found["input_scale"] = StoredTensor("input_scale", OneScale())
    return found


def nvfp4(spec: WeightSpec) -> StoredWeight:
    """The tensors of NVFP4; activations keep their type, whatever their scale."""
    return {**nvfp4_weight_only(spec), "input_scale": StoredTensor(None, OnlyChecked(OneScale()))}


def nvfp4_weight_only(spec: WeightSpec) -> StoredWeight:
    """The tensors of NVFP4 that say nothing of activations."""
    assert spec.group is not None
    return {
        "weight": StoredTensor("codes", HalfCodes()),
        "weight_scale": StoredTensor("scales", Fp8Scales(spec.group)),
        "weight_scale_2": StoredTensor("factors", OneScale()),
    }


class HalfCodes(TensorForm):
    """Codes of half a byte, [rows, inputs / 2]."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.rows, -(-matrix.inputs // 2)))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return found[rows, inputs.start // 2 : inputs.stop // 2]


@dataclass(frozen=True)
class Fp8Scales(TensorForm):
    """Scales of fp8, [rows, groups]."""

    group: int

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float8_e4m3fn,)

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.rows, -(-matrix.inputs // self.group)))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        groups = slice(inputs.start // self.group, inputs.stop // self.group)
        return finite(found.view(torch.uint8)[rows, groups].view(torch.float8_e4m3fn))
