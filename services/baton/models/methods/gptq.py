"""The quantization_config of GPTQ, as AutoGPTQ and gptqmodel write it.

https://huggingface.co/docs/transformers/quantization/gptq"""

from __future__ import annotations

import re

from baton.models.json_fields import Fields
from baton.models.methods.module_lists import pattern
from baton.models.quantization.weight_spec import (
    EVERYTHING,
    HEAD,
    ModuleNames,
    QuantizedCheckpoint,
    WeightRule,
    WeightSpec,
)
from baton_kernels.code_formats import CodeFormat

OVERRIDES = ("bits", "group_size", "desc_act", "sym")
"""The fields that ``dynamic`` may give modules of their own."""


def read(fields: Fields) -> QuantizedCheckpoint:
    """What the object says. ModelError for fields with values that are not served."""
    named = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    form = fields.text(named, "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise fields.error(named, '"gptq" or "gptq_v2"')
    fields.only("is_marlin_format", False)
    fields.only("pack_dtype", "int32")
    rules = _dynamic(fields, form)
    if not fields.flag("lm_head", False):
        rules.append(WeightRule(HEAD, None))
    rules.append(WeightRule(_quantized(fields), _spec(fields, form)))
    return QuantizedCheckpoint("gptq", tuple(rules))


def _spec(fields: Fields, form: str) -> WeightSpec:
    codes: dict[object, CodeFormat] = {4: "int4", 8: "int8"}
    bits, group = fields.integer("bits"), group_size(fields)
    if bits not in codes:
        raise fields.error("bits", "4 or 8")
    return WeightSpec(
        form,
        codes[bits],
        group,
        scale_type="float16",
        zeros=not fields.flag("sym", True),
        ordered=fields.flag("desc_act", False) and group is not None,
    )


def group_size(fields: Fields) -> int | None:
    """The inputs of a group; None, written as -1: all of them."""
    if fields.get("group_size") == -1:
        return None
    size = fields.integer("group_size")
    if size % 2:
        raise fields.error("group_size", "-1 or an even number")
    return size


def _dynamic(fields: Fields, form: str) -> list[WeightRule]:
    """The rules of gptqmodel's ``dynamic``: regular expressions of modules that have fields of their own, or,
    behind "-:", are plain."""
    overrides = fields.object("dynamic")
    rules: list[WeightRule] = []
    for key in overrides.names:
        modules = ModuleNames(pattern=pattern(fields, "dynamic", key.removeprefix("+:").removeprefix("-:")))
        if key.startswith("-:"):
            rules.append(WeightRule(modules, None))
            continue
        own = overrides.object(key)
        for field in own.names:
            if field not in OVERRIDES:
                raise own.error(field, "no such field; allowed fields: " + ", ".join(OVERRIDES))
        defaults = {name: fields.get(name) for name in OVERRIDES if fields.has(name)}
        rules.append(WeightRule(modules, _spec(own.with_defaults(defaults), form)))
    return rules


def _quantized(fields: Fields) -> ModuleNames:
    """The modules that are quantized: all, or the modules of each layer that a list, or lists, name."""
    field = "modules_in_block_to_quantize"
    if not fields.has(field):
        return EVERYTHING
    value = fields.get(field)
    items = [
        item
        for entry in (value if isinstance(value, list) else [value])
        for item in (entry if isinstance(entry, list) else [entry])
    ]
    names = [item for item in items if isinstance(item, str)]
    if not names or len(names) < len(items):
        raise fields.error(field, "names of modules, or lists of such names")
    listed = "|".join(map(re.escape, names))
    return ModuleNames(pattern=rf"(?:.*\.)?(?:{listed})$")
