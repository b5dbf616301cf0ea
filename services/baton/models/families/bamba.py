"""Bamba (https://huggingface.co/blog/bamba): Mamba-2 in most layers, attention in some."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.expert_fields import layer_numbers
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.mamba_fields import read_mamba

NAMES = (
    (".post_attention_layernorm.", ".pre_ff_layernorm."),
    (".mlp.", ".feed_forward."),
    ("model.norm.", "model.final_layernorm."),
)


def read(fields: Fields) -> ModelConfig:
    """Read Bamba's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(
        fields.without("partial_rotary_factor"),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
        default_kv_heads=8,
        default_eps=1e-5,
        partial_rotary=0.5,
    )
    layers = config.num_layers
    attention = layer_numbers(fields, "attn_layer_indices", layers)
    return replace(
        config,
        mixers=tuple(("attention",) if layer in attention else ("mamba",) for layer in range(layers)),
        mamba=read_mamba(fields),
        names=NAMES,
    )
