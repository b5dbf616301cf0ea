"""GLM-4 (https://arxiv.org/abs/2406.12793), dense: half of each head is rotated, by neighbours, and gate and
up projections are one tensor."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields


def read(fields: Fields) -> ModelConfig:
    """Read the config of the first GLM-4. ModelError if it is not one that Baton serves."""
    config = llama_like(
        fields,
        qkv_bias=fields.flag("attention_bias", True),
        default_head_dim=128,
        default_kv_heads=2,
        partial_rotary=0.5,
        interleaved_rotary=True,
        default_eps=1.5625e-7,
    )
    return replace(config, fused_gate_up=True)


def read_0414(fields: Fields) -> ModelConfig:
    """Read the config of GLM-4-0414, which has norms behind attention and MLP, too. ModelError likewise."""
    return replace(read(fields), norm_places="around")
