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
    fields.only("scale_fmt", "ue8m0", "float")
    if strings(fields, "modules_to_convert"):
        raise fields.error("modules_to_convert", "[]")
    scheme = fields.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.error("activation_scheme", '"dynamic" or "static"')
    rows, group = None, None
    if fields.has("weight_block_size"):
        rows, group = block_size(fields, "weight_block_size")
    rounding: Rounding = "fp8-tensor" if scheme == "static" else "fp8-row" if group is None else "fp8-group"
    spec = WeightSpec("fp8", "fp8", group, rows, rounding=rounding)
    plain = [left_plain(fields, name) for name in ("modules_to_not_convert", "ignored_layers")]
    rules = (WeightRule(HEAD, None), *(WeightRule(names, None) for names in plain))
    return QuantizedCheckpoint(
        "fp8",
        (*rules, WeightRule(EVERYTHING, spec)),
        kv_scales=True,
        renamed=(
            (".weight_scale", ".weight_scale_inv"),
            (".input_scale", ".activation_scale"),
        ),
    )


def block_size(fields: Fields, name: str) -> tuple[int, int]:
    """The outputs and inputs that share a scale."""
    block = fields.get(name)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise fields.error(name, "a list of two whole numbers above 0")
    return block[0], block[1]


def left_plain(fields: Fields, name: str) -> ModuleNames:
    """The modules that a list names as transformers reads it: by parts of their names, by their end, or by a
    regular expression of their beginning."""
    listed = strings(fields, name)
    for expression in listed:
        try:
            re.compile(expression)
        except re.error as error:
            raise fields.invalid(name, expression, f"regular expressions ({error})") from None
    beginnings, parts = ("|".join(each) for each in (listed, map(re.escape, listed)))
    patterns = (
        rf"(?:.*\.)?(?:{parts})(?:\..*)?$",
        rf".*(?:{parts})$",
        rf"(?:{beginnings})(?:(?<=\.)|(?=\.|$))",
    )
    return ModuleNames(pattern="|".join(patterns) if listed else "")


def strings(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of strings; empty if the field is missing."""
    value = fields.get(name) if fields.has(name) else []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error(name, "a list of strings")
    return tuple(value)
