"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama with layers whose queries and keys are not rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families import llama
from baton.models.json_fields import Fields
from baton.models.layer_windows import FULL, SLIDING, layer_kinds, windows_of_kinds


def read(fields: Fields) -> ModelConfig:
    """Read SmolLM3's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults(
        {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
    )
    config = llama.read(fields)
    rotated = _rotated(fields, config.num_layers)
    ropes = tuple(rope if turned else None for rope, turned in zip(config.ropes, rotated, strict=True))
    return replace(config, ropes=ropes, windows=_windows(fields, rotated))


def _rotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is rotated: 1 in ``no_rope_layers``, or all but each ``no_rope_layer_interval``th
    one."""
    if not fields.has("no_rope_layers"):
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    flags = fields.get("no_rope_layers")
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"{num_layers} times 0 or 1")
    return tuple(flag == 1 for flag in flags)


def _windows(fields: Fields, rotated: Sequence[bool]) -> tuple[int | None, ...]:
    """A window, with ``use_sliding_window``, in the layers that ``layer_types`` names, or, without it, in
    the layers that are not rotated."""
    windowed = fields.flag("use_sliding_window", False) and fields.has("sliding_window")
    usual = [SLIDING if windowed and not turned else FULL for turned in rotated]
    kinds = layer_kinds(fields, len(rotated), usual)
    if SLIDING in kinds and not windowed:
        raise fields.error("layer_types", f"{FULL} only, unless use_sliding_window is true")
    return windows_of_kinds(fields, kinds)
