"""What ModelOpt writes of quantized weights, in config.json or beside it in hf_quant_config.json.

https://nvidia.github.io/Model-Optimizer/"""

from __future__ import annotations

import re

from baton.models.json_fields import Fields
from baton.models.methods.module_lists import below, wildcards
from baton.models.quantization.weight_spec import EVERYTHING, QuantizedCheckpoint, WeightRule, WeightSpec

BLOCK = 128
"""The outputs and inputs of a block of FP8_PB_WO."""
NVFP4_GROUP = 16
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4")


def read(fields: Fields) -> QuantizedCheckpoint:
    """What the object says. ModelError for fields with values that are not served."""
    said = fields.object("quantization") if fields.has("quantization") else fields
    plain = wildcards(said, "exclude_modules" if said.has("exclude_modules") else "ignore")
    rules = [WeightRule(plain, None)]
    if said.text("quant_algo") == "MIXED_PRECISION":
        layers = said.object("quantized_layers")
        rules += [WeightRule(below([re.escape(name)]), _spec(layers.object(name))) for name in layers.names]
    else:
        rules.append(WeightRule(EVERYTHING, _spec(said)))
    return QuantizedCheckpoint("modelopt", tuple(rules), kv_scales=_has_kv_scales(said))


def _spec(fields: Fields) -> WeightSpec:
    match fields.text("quant_algo").upper():
        case "FP8":
            return WeightSpec("modelopt_fp8", "fp8", None, None, rounding="fp8-tensor")
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return WeightSpec("modelopt_fp8", "fp8", rounding="fp8-row")
        case "FP8_PB_WO":
            block = fields.integer("group_size", BLOCK)
            return WeightSpec("modelopt_fp8", "fp8", block, block)
        case "NVFP4" | "W4A16_NVFP4" as algorithm:
            group = fields.integer("group_size", NVFP4_GROUP)
            if group % 2:
                raise fields.error("group_size", "an even number")
            form = "modelopt_nvfp4" if algorithm == "NVFP4" else "modelopt_nvfp4_weight_only"
            return WeightSpec(form, "fp4", group, scale_type="fp8", factors=True)
        case _:
            raise fields.error("quant_algo", ", ".join((*ALGORITHMS, "MIXED_PRECISION")))


def _has_kv_scales(fields: Fields) -> bool:
    """Whether K and V have scales for FP8. ModelError for scales for something else."""
    if fields.has("kv_cache_scheme"):
        scheme = fields.object("kv_cache_scheme")
        scheme.only("type", "float")
        scheme.only("num_bits", 8)
        return True
    fields.only("kv_cache_quant_algo", "FP8")
    return fields.has("kv_cache_quant_algo")
