"""Cohere 2 (Command R7B, Command A: https://arxiv.org/abs/2504.00698): attention and MLP beside each other
behind one layer norm without bias, windows in three layers of four, which alone are rotated, and scaled
logits."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import every_nth_sees_all, layer_kinds, windows_of_kinds

REQUIRED = MappingProxyType(
    {
        "use_qk_norm": False,
        "use_parallel_block": True,
        "use_gated_activation": True,
        "rotary_pct": 1.0,
        "position_embedding_type": "rope_gptj",
    }
)
"""Fields of published configs that transformers does not read, and the values that it takes for granted."""


def read(fields: Fields) -> ModelConfig:
    """Read Cohere 2's config. ModelError if it is not one that Baton serves."""
    for name, only in REQUIRED.items():
        fields.only(name, only)
    biased = fields.flag("attention_bias", False)
    config = llama_like(
        fields,
        qkv_bias=biased,
        o_bias=biased,
        interleaved_rotary=True,
        eps="layer_norm_eps",
        default_eps=1e-5,
        ties_embeddings=True,
    )
    nth = fields.integer("sliding_window_pattern", 4)
    kinds = layer_kinds(fields, config.num_layers, every_nth_sees_all(config.num_layers, nth))
    windows = windows_of_kinds(fields, kinds)
    return replace(
        config,
        windows=windows,
        ropes=tuple(None if window is None else config.ropes[0] for window in windows),
        layer_norm=True,
        norm_places="beside",
        logits_scale=fields.number("logit_scale", 0.0625),
    )
