"""Weights that the formats' own packages packed (tests/support/packed_references.py), bit by bit as they read
them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from baton.models.quantization.base import LinearShape
from baton.models.quantization.quantized import QuantizedWeights
from baton.models.quantization.weight_spec import WeightSpec
from tests.support.packed_references import FILE, GROUP, INPUTS, OUTPUTS

SPECS = {
    "gptq-4": WeightSpec("gptq", "int4", GROUP, scale_type="float16", zeros=True),
    "gptq-4-ordered": WeightSpec("gptq_v2", "int4", GROUP, scale_type="float16", zeros=True, ordered=True),
    "gptq-8": WeightSpec("gptq", "int8", GROUP, scale_type="float16", zeros=True),
    "awq": WeightSpec("awq", "int4", GROUP, scale_type="float16", zeros=True),
    "nvfp4": WeightSpec("modelopt_nvfp4_weight_only", "fp4", 16, scale_type="fp8", factors=True),
}


@pytest.mark.parametrize("name", SPECS)
def test_weights_are_those_that_the_package_reads(name: str) -> None:
    stored = load_file(FILE)
    shape = LinearShape(range(INPUTS), {"": range(OUTPUTS)}, torch.float32)
    weights = QuantizedWeights(shape, SPECS[name])
    for end, place in weights.places()[""].items():
        assert stored[f"{name}.{end}"].dtype in place.dtypes
        assert place.fits(stored[f"{name}.{end}"].shape, place.shape)
        place.load(stored[f"{name}.{end}"])
    expected = stored[f"{name}.stands_for"]
    assert expected.abs().max() > 0.2
    assert torch.equal(weights.plain().to(expected.dtype), expected)
