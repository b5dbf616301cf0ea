"""FP8 weights as DeepSeek, Qwen and transformers publish them: blocks of outputs and inputs share a scale.

https://huggingface.co/docs/transformers/quantization/finegrained_fp8"""

from __future__ import annotations

import torch

from baton.models.quantization.stored import (
    Blocks,
    Codes,
    GroupScales,
    InputScale,
    StoredTensor,
    StoredWeight,
)
from baton.models.quantization.weight_spec import WeightSpec


def tensors(spec: WeightSpec) -> StoredWeight:
    """The codes, what the codes are multiplied with, and the scale of activations if that is known."""
    found = {
        "weight": StoredTensor("codes", Codes(torch.float8_e4m3fn)),
        "weight_scale_inv": StoredTensor("scales", GroupScales(Blocks(spec.scale_rows, spec.group))),
    }
    if spec.rounding == "fp8-tensor":
        found["activation_scale"] = StoredTensor("input_scale", InputScale())
    return found
