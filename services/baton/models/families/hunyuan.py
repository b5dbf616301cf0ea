"""Hunyuan (https://github.com/Tencent-Hunyuan), dense: Llama with queries and keys normalized per head behind
the rotation."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig, RopeConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields

NAMES = ((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm."))
REQUIRED = MappingProxyType(
    {"use_qk_norm": True, "use_rotary_pos_emb": True, "use_cla": False, "mlp_bias": False, "num_experts": 1}
)
"""Fields of published configs that transformers does not read, and the values that it takes for granted."""


def read(fields: Fields) -> ModelConfig:
    """Read Hunyuan's config. ModelError if it is not one that Baton serves."""
    for name, only in REQUIRED.items():
        fields.only(name, only)
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased, default_eps=1e-5)
    return normed_behind_rotation(fields, config)


def normed_behind_rotation(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The config with what is Hunyuan's own in attention."""
    rope = _rope(fields, config)
    return replace(config, names=NAMES, head_norm="rotated", ropes=(rope,) * config.num_layers)


def _rope(fields: Fields, config: ModelConfig) -> RopeConfig:
    """The rotary embedding: one of kind dynamic with an ``alpha`` is not dynamic, but has a greater base."""
    rope, dim = config.rope, config.head_dim
    written = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    alpha = written.number("alpha", minimum=1.0) if written.has("alpha") else None
    if rope.kind != "dynamic" or alpha is None:
        return rope
    return RopeConfig(theta=rope.theta * alpha ** (dim / (dim - 2)))
