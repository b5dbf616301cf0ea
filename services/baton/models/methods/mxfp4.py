"""The quantization_config of gpt-oss, whose experts alone are quantized.

https://huggingface.co/docs/transformers/quantization/mxfp4"""

from __future__ import annotations

from baton.models.json_fields import Fields
from baton.models.methods.module_lists import from_start
from baton.models.quantization.weight_spec import ModuleNames, QuantizedCheckpoint, WeightRule, WeightSpec

EXPERTS = ModuleNames(pattern=r".*\.experts\.(?:gate_up_proj|down_proj)$")


def read(fields: Fields) -> QuantizedCheckpoint:
    """What the object says. ModelError for fields with values that are not served."""
    plain = from_start(fields, "modules_to_not_convert")
    spec = WeightSpec("mxfp4", "fp4", 32, scale_type="e8m0")
    return QuantizedCheckpoint("mxfp4", (WeightRule(plain, None), WeightRule(EXPERTS, spec)))
