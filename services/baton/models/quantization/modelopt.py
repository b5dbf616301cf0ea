"""Weights as NVIDIA's ModelOpt publishes them: FP8, and NVFP4, which is fp4 in groups whose scales are fp8.

https://nvidia.github.io/Model-Optimizer/"""

from __future__ import annotations

import torch

from baton.models.quantization.stored import (
    Blocks,
    ByteScales,
    Codes,
    GroupScales,
    HalfBytes,
    InputScale,
    OneScale,
    OnlyChecked,
    StoredTensor,
    StoredWeight,
)
from baton.models.quantization.weight_spec import WeightSpec


def fp8(spec: WeightSpec) -> StoredWeight:
    """The codes, what the codes are multiplied with, and the scale of activations if that is known."""
    found = {
        "weight": StoredTensor("codes", Codes(torch.float8_e4m3fn)),
        "weight_scale": StoredTensor("scales", GroupScales(Blocks(spec.scale_rows, spec.group))),
    }
    if spec.rounding == "fp8-tensor":
        found["input_scale"] = StoredTensor("input_scale", InputScale())
    return found


def nvfp4(spec: WeightSpec) -> StoredWeight:
    """The tensors of NVFP4; activations keep their type, whatever their scale."""
    return {**nvfp4_weight_only(spec), "input_scale": StoredTensor(None, OnlyChecked(OneScale()))}


def nvfp4_weight_only(spec: WeightSpec) -> StoredWeight:
    """The tensors of NVFP4 that say nothing of activations."""
    return {
        "weight": StoredTensor("codes", HalfBytes()),
        "weight_scale": StoredTensor("scales", ByteScales(Blocks(1, spec.group), torch.float8_e4m3fn)),
        "weight_scale_2": StoredTensor("factors", OneScale()),
    }
