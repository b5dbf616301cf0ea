"""The quantization_config of FP8 checkpoints of DeepSeek, Qwen and transformers.

https://huggingface.co/docs/transformers/quantization/finegrained_fp8"""

from __future__ import annotations

import re

from baton.models.json_fields import Fields
from baton.models.quantization.weight_spec import (
    EVERYTHING,
    HEAD,
    ModuleNames,
    QuantizedCheckpoint,
    WeightRule,
    WeightSpec,
)
from baton_kernels.code_formats import Rounding


def read(fields: Fields) -> QuantizedCheckpoint:
    """What the object says. ModelError for fields with values that are not served."""
    fields.only("fmt", "e4m3")
    scheme = fields.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.error("activation_scheme", '"dynamic" or "static"')
    rows, group = _block(fields)
    rounding: Rounding = "fp8-tensor" if scheme == "static" else "fp8-row" if group is None else "fp8-group"
    spec = WeightSpec("fp8", "fp8", group, rows, rounding=rounding)
    plain = left_plain(fields, "modules_to_not_convert")
    return QuantizedCheckpoint(
        "fp8", (WeightRule(HEAD, None), WeightRule(plain, None), WeightRule(EVERYTHING, spec))
    )


def _block(fields: Fields) -> tuple[int | None, int | None]:
    """The outputs and inputs that share a scale; None: all."""
    if not fields.has("weight_block_size"):
        return None, None
    block = fields.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise fields.error("weight_block_size", "a list of two whole numbers above 0")
    return block[0], block[1]


def left_plain(fields: Fields, name: str) -> ModuleNames:
    """The modules that a list names: by their whole name, its beginning or end, in whole parts."""
    listed = "|".join(map(re.escape, strings(fields, name)))
    return ModuleNames(pattern=rf"(?:.*\.)?(?:{listed})(?:\..*)?$" if listed else "")


def strings(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of strings; empty if the field is missing."""
    value = fields.get(name) if fields.has(name) else []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error(name, "a list of strings")
    return tuple(value)
