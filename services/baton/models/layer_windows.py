"""The sliding windows of a model's layers by its config.json: one function for each way to state them.

The functions follow the rules and defaults of transformers. Each takes config.json and the number of layers,
and returns for each layer how many tokens a token sees, itself included; None: all tokens. They raise
ModelError.
"""

from __future__ import annotations

from baton.models.json_fields import Fields


def no_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def one_window(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """``sliding_window`` in every layer, as in Mistral: a missing one means 4096, null means none."""
    none = fields.is_null("sliding_window")
    return (None if none else fields.integer("sliding_window", 4096),) * num_layers


def windows_by_layer_type(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """``sliding_window`` in the layers that ``layer_types`` names, or, without it, from ``max_window_layers``
    on, and in no layer unless ``use_sliding_window``."""
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    if not fields.has("layer_types"):
        full_layers = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(None if layer < full_layers else window for layer in range(num_layers))
    kinds = fields.get("layer_types")
    allowed = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not allowed.issuperset(kinds):
        raise fields.error("layer_types", f"{num_layers} times full_attention or sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise fields.error("layer_types", "full_attention only, unless use_sliding_window is true")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def alternating_windows(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """``window`` in the layers that ``layer_types`` names, or, without it, in every other one from the first
    on."""
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    kinds = layer_types(fields, alternating, "sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise fields.error("layer_types", "full_attention only, without a sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_types(fields: Fields, default: list[str], partial: str) -> list[str]:
    """``layer_types``, of which each is full_attention or ``partial``. ``default``: those of a config without
    it."""
    kinds = fields.get("layer_types") if fields.has("layer_types") else default
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(default)
        or not {"full_attention", partial} >= {*kinds}
    ):
        raise fields.error("layer_types", f"{len(default)} times full_attention or {partial}")
    return kinds
