"""The quantization_config of the package compressed-tensors.

https://github.com/vllm-project/compressed-tensors"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from baton.models.json_fields import Fields
from baton.models.methods.fp8 import block_size, strings
from baton.models.quantization.weight_spec import (
    EVERYTHING,
    ModuleNames,
    QuantizedCheckpoint,
    ScaleType,
    WeightRule,
    WeightSpec,
)
from baton_kernels.code_formats import CodeFormat, Rounding

REGEX = "re:"
"""The beginning of a target that is a regular expression."""
LINEAR = "Linear"
"""The class of module that is every projection."""
MIXED = "mixed-precision"
"""The format of a checkpoint whose groups have formats of their own."""
UNUSED = (
    ".weight_shape",
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".k_zero_point",
    ".v_zero_point",
)
"""Ends of the names of tensors that follow from others, or are of activations that are rounded otherwise."""


class _Format(NamedTuple):
    """One format of weights."""

    form: str
    type: str
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    group: int | None = None
    """The size of all groups; None: as the config says."""
    scale_type: ScaleType = "float32"
    factors: bool = False


_INTS = ("tensor", "channel", "group")
_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "float-quantized": _Format("compressed", "float", (8,), ("tensor", "channel", "group", "block")),
        "int-quantized": _Format("compressed", "int", (4, 8), _INTS),
        "pack-quantized": _Format("compressed-ints", "int", (4, 8), ("channel", "group")),
        "nvfp4-pack-quantized": _Format(
            "compressed-fp4", "float", (4,), ("tensor_group",), 16, "fp8", factors=True
        ),
        "mxfp4-pack-quantized": _Format("compressed-fp4", "float", (4,), ("group",), 32, "e8m0"),
        "mxfp8-quantized": _Format("compressed", "float", (8,), ("group",), 32, "e8m0"),
    }
)
_NAIVE = "naive-quantized"
"""The old name of float-quantized and int-quantized."""


def read(fields: Fields) -> QuantizedCheckpoint:
    """What the object says. ModelError for fields with values that are not served."""
    _refuse_others(fields)
    by_target = dict[str, WeightSpec]()
    groups = fields.object("config_groups")
    for name in groups.names:
        by_target |= _group(groups.object(name), fields)
    if not by_target:
        raise fields.error("config_groups", "an object with at least one group")
    ignored = _names(fields, "ignore", strings(fields, "ignore"))
    rules = [WeightRule(ignored, None)]
    # The order of the package: names before regular expressions, each sorted, and then classes.
    for target in sorted(by_target, key=lambda target: (target == LINEAR, target.startswith(REGEX), target)):
        names = EVERYTHING if target == LINEAR else _names(groups, "targets", (target,))
        rules.append(WeightRule(names, by_target[target]))
    scales = fields.has("kv_cache_scheme") and _kv_scales(fields.object("kv_cache_scheme"))
    return QuantizedCheckpoint("compressed-tensors", tuple(rules), kv_scales=scales, unused=UNUSED)


def _refuse_others(fields: Fields) -> None:
    """Refuses what is not computed."""
    if fields.has("sparsity_config") and fields.object("sparsity_config").names:
        fields.object("sparsity_config").only("format", "dense")
    if fields.has("transform_config") and fields.object("transform_config").names:
        raise fields.error("transform_config", "{}")


def _names(fields: Fields, field: str, targets: Iterable[str]) -> ModuleNames:
    """The modules with these names or, behind "re:", whose names begin as a regular expression says."""
    exact = frozenset(target for target in targets if not target.startswith(REGEX))
    patterns = [target.removeprefix(REGEX) for target in targets if target.startswith(REGEX)]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.invalid(field, REGEX + pattern, f"regular expressions ({error})") from None
    return ModuleNames(exact, "|".join(f"(?:{pattern})" for pattern in patterns))


def _group(group: Fields, fields: Fields) -> dict[str, WeightSpec]:
    """Each target of a group -> how its weights are kept."""
    targets = strings(group, "targets")
    for target in targets:
        if target != LINEAR and target[:1].isupper() and "." not in target:
            raise group.invalid(
                "targets", target, f'"{LINEAR}", names of modules, and "{REGEX}" in front of them'
            )
    if not targets or not group.has("weights"):
        raise group.error("weights" if targets else "targets", "those of a group's projections")
    if group.has("output_activations"):
        raise group.error("output_activations", "null")
    spec = _spec(group, _format(group, fields))
    return dict.fromkeys(targets, spec)


def _format(group: Fields, fields: Fields) -> _Format:
    """The format of a group: its own, or that of the checkpoint."""
    holder = group if group.has("format") else fields
    name = holder.text("format")
    if name == _NAIVE:
        name = "int-quantized" if group.object("weights").get("type") == "int" else "float-quantized"
    if name not in _FORMATS:
        allowed = ", ".join((*_FORMATS, _NAIVE, *((MIXED,) if holder is fields else ())))
        if name == MIXED and holder is fields:
            raise group.error("format", allowed)
        raise holder.error("format", allowed)
    return _FORMATS[name]


def _spec(group: Fields, form: _Format) -> WeightSpec:
    weights = group.object("weights")
    weights.only("type", form.type)
    bits = weights.integer("num_bits", 8)
    if bits not in form.bits:
        raise weights.error("num_bits", " or ".join(map(str, form.bits)))
    weights.only("dynamic", False)
    strategy = _strategy(weights)
    if strategy not in form.strategies:
        raise weights.invalid("strategy", strategy, ", ".join(form.strategies))
    rows, size = _blocks(weights, strategy)
    if form.group is not None and size != form.group:
        raise weights.error("group_size", str(form.group))
    zeros = not weights.flag("symmetric", True)
    if zeros and form.type != "int":
        raise weights.error("symmetric", "true")
    spec = WeightSpec(
        form.form,
        _code(form, bits),
        size,
        rows,
        scale_type=form.scale_type,
        zeros=zeros,
        factors=form.factors,
        ordered=_is_ordered(weights),
        rounding=_rounding(group, form, strategy),
    )
    if spec.ordered and (form.form != "compressed-ints" or size is None):
        raise weights.error("actorder", "null")
    return spec


def _code(form: _Format, bits: int) -> CodeFormat:
    if form.type == "float":
        return "fp8" if bits == 8 else "fp4"
    return "int4" if bits == 4 and form.form == "compressed-ints" else "int8"


def _strategy(weights: Fields) -> str:
    """What shares a scale, which old configs leave to group_size."""
    if weights.has("strategy"):
        return weights.text("strategy")
    if not weights.has("group_size"):
        return "tensor"
    return "channel" if weights.get("group_size") == -1 else "group"


def _blocks(weights: Fields, strategy: str) -> tuple[int | None, int | None]:
    """The outputs and inputs that share a scale; None: all."""
    match strategy:
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "block":
            return block_size(weights, "block_structure")
        case _:
            return 1, weights.integer("group_size")


def _is_ordered(weights: Fields) -> bool:
    """Whether groups have inputs that do not follow each other. An order of the rounding leaves no trace."""
    weights.only("actorder", "group", "dynamic", "weight", "static", True, False)
    return weights.get("actorder") in ("group", "dynamic", True)


def _rounding(group: Fields, form: _Format, strategy: str) -> Rounding:
    """How activations are rounded where the weights' units want it. Weights of 4 bits, in groups and with
    powers of two as scales are multiplied with activations as they are."""
    if not group.has("input_activations"):
        return "none"
    inputs = group.object("input_activations")
    if inputs.get("num_bits") != 8 or inputs.get("type") != form.type or form.scale_type != "float32":
        return "none"
    dynamic = inputs.get("dynamic") is True
    if form.form == "compressed" and form.type == "int":
        return "int8-row" if strategy in ("tensor", "channel") else "none"
    match strategy:
        case "tensor" | "channel" if form.type == "float":
            return "fp8-row" if dynamic else "fp8-tensor"
        case "block":
            return "fp8-group" if dynamic else "none"
        case _:
            return "none"


def _kv_scales(scheme: Fields) -> bool:
    """Whether the checkpoint has scales of K and V. ModelError for scales that are no two of a layer."""
    scheme.only("type", "float")
    scheme.only("num_bits", 8)
    scheme.only("strategy", "tensor")
    scheme.only("symmetric", True)
    return not scheme.flag("dynamic", False)
