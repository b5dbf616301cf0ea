"""The experts of a config.json. Imports no torch: the router uses it too.

The functions follow the rules and defaults of transformers, and raise ModelError.
"""

from __future__ import annotations

from baton.models.json_fields import MOST_LAYERS, Fields
from baton_kernels.routing_rule import Routing


def fitting(
    fields: Fields, routing: Routing, num_experts: int, *, chosen: str = "num_experts_per_tok"
) -> Routing:
    """The routing, if so many of ``num_experts`` experts can be chosen. ``chosen``: the field that says how
    many are."""
    if num_experts % routing.groups:
        raise fields.error("n_group", f"a divisor of the number of experts ({num_experts})")
    if routing.top_groups > routing.groups:
        raise fields.error("topk_group", f"1 to n_group ({routing.groups})")
    allowed = num_experts // routing.groups * routing.top_groups
    if routing.top_k > allowed:
        raise fields.error(chosen, f"1 to {allowed}, the experts that are chosen from")
    return routing


def either(fields: Fields, name: str, other: str) -> str:
    """``other`` if the config has that field and not ``name``; the two are one field by two names."""
    return other if fields.has(other) and not fields.has(name) else name


def sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: every ``decoder_sparse_step``-th, but not ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = layer_numbers(fields, "mlp_only_layers", num_layers)
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def layer_numbers(fields: Fields, name: str, num_layers: int) -> frozenset[int]:
    """The layers that a field lists; a missing field lists none."""
    found = fields.get(name) if fields.has(name) else []
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < num_layers for n in found):
        raise fields.error(name, f"a list of layers, each 0 to {num_layers - 1}")
    return frozenset(found)


def mlp_layer_types(fields: Fields, num_layers: int, *, dense: int) -> tuple[bool, ...]:
    """Whether each layer has experts, by ``mlp_layer_types``; without it, all but the first ``dense``."""
    if not fields.has("mlp_layer_types"):
        return tuple(layer >= dense for layer in range(num_layers))
    kinds = fields.get("mlp_layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {"dense", "sparse"}.issuperset(kinds):
        raise fields.error("mlp_layer_types", f"{num_layers} times dense or sparse")
    return tuple(kind == "sparse" for kind in kinds)


def same_in_all_layers(fields: Fields, name: str, default: int, num_layers: int) -> int:
    """A whole number, or a list that has it once for each layer."""
    found = fields.get(name)
    if not isinstance(found, list):
        return fields.integer(name, default)
    least = found[0] if found else 0
    is_number = type(least) is int and least >= 1
    if not is_number or len(found) < num_layers or any(value != least for value in found):
        raise fields.error(name, f"a whole number of at least 1, the same in all {num_layers} layers")
    return int(least)


def draft_layers(fields: Fields, name: str, default: int, num_layers: int) -> tuple[str, ...]:
    """The beginnings of the names of tensors of the layers behind the last one, which draft tokens (multi-
    token prediction). ``name``: the field with their number."""
    count = fields.integer(name, default, minimum=0, maximum=MOST_LAYERS)
    return tuple(f"model.layers.{num_layers + layer}." for layer in range(count))
