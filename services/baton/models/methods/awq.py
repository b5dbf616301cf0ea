"""The quantization_config of AWQ, as AutoAWQ writes it.

https://huggingface.co/docs/transformers/quantization/awq"""

from __future__ import annotations

from baton.models.json_fields import Fields
from baton.models.methods.gptq import group_size
from baton.models.methods.module_lists import containing
from baton.models.quantization.weight_spec import (
    EVERYTHING,
    HEAD,
    QuantizedCheckpoint,
    WeightRule,
    WeightSpec,
)


def read(fields: Fields) -> QuantizedCheckpoint:
    """What the object says. ModelError for fields with values that are not served."""
    if fields.integer("bits") != 4:
        raise fields.error("bits", "4")
    for name in ("version", "format", "checkpoint_format"):
        if fields.text(name, "gemm").lower() != "gemm":
            raise fields.error(name, '"gemm"')
    spec = WeightSpec(
        "awq", "int4", group_size(fields), scale_type="float16", zeros=fields.flag("zero_point", True)
    )
    plain = containing(fields, "modules_to_not_convert")
    return QuantizedCheckpoint(
        "awq", (WeightRule(HEAD, None), WeightRule(plain, None), WeightRule(EVERYTHING, spec))
    )
