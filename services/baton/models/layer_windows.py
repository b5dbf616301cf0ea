"""The sliding windows of a model's layers by its config.json: one function for each way to state them.

The functions follow the rules and defaults of transformers. Each takes config.json and the number of layers,
and returns for each layer how many tokens a token sees, itself included; None: all tokens. They raise
ModelError.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.models.json_fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers by their names in ``layer_types``."""


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
    kinds = layer_kinds(fields, num_layers, ())
    if SLIDING in kinds and window is None:
        raise fields.error("layer_types", "full_attention only, unless use_sliding_window is true")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def alternating_windows(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """``window`` in the layers that ``layer_types`` names, or, without it, in every other one from the first
    on."""
    kinds = layer_kinds(fields, num_layers, [FULL if layer % 2 else SLIDING for layer in range(num_layers)])
    if SLIDING in kinds and window is None:
        raise fields.error("layer_types", f"{FULL} only, without a sliding window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def layer_kinds(
    fields: Fields, num_layers: int, default: Sequence[str], partial: str = SLIDING
) -> tuple[str, ...]:
    """The kind of each layer by ``layer_types``, ``FULL`` or ``partial``; ``default`` without it."""
    if not fields.has("layer_types"):
        return tuple(default)
    kinds = fields.get("layer_types")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (FULL, partial) for kind in kinds)
    ):
        raise fields.error("layer_types", f"{num_layers} times {FULL} or {partial}")
    return tuple(kinds)


def every_nth_sees_all(num_layers: int, nth: int) -> tuple[str, ...]:
    """The kinds of layers of which each ``nth`` sees all tokens, and the others have a window."""
    return tuple(SLIDING if (layer + 1) % nth else FULL for layer in range(num_layers))


def windows_of_kinds(fields: Fields, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """``sliding_window`` in the layers of kind ``SLIDING``; a missing one means 4096, null is refused."""
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    if fields.is_null("sliding_window"):
        raise fields.error("sliding_window", f"a whole number of at least 1, for the layers of {SLIDING}")
    window = fields.integer("sliding_window", 4096)
    return tuple(window if kind == SLIDING else None for kind in kinds)
