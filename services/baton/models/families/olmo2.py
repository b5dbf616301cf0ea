"""OLMo 2 (https://arxiv.org/abs/2501.00656) and OLMo 3: norms behind attention and MLP instead of in front,
and queries and keys normalized over all heads together."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import every_nth_sees_all, layer_kinds, windows_of_kinds
from baton.models.rope_fields import read_ropes_of_kinds

NAMES = (
    (".post_self_attn_layernorm.", ".post_attention_layernorm."),
    (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
)
THETA = 500_000.0
"""The rotary base that an OLMo 3 without one has."""


def read(fields: Fields) -> ModelConfig:
    """Read OLMo 2's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased, default_eps=1e-5)
    return replace(config, names=NAMES, norm_places="after", head_norm="whole")


def read_olmo3(fields: Fields) -> ModelConfig:
    """Read the config of OLMo 3, of which three layers in four have a window, and of which the other layers'
    rotary embedding alone is stretched. ModelError likewise."""
    fields.only("sliding_window_pattern", 4)
    config = read(fields.without("rope_scaling", "rope_parameters"))
    kinds = layer_kinds(fields, config.num_layers, every_nth_sees_all(config.num_layers, 4))
    ropes = read_ropes_of_kinds(fields, config.head_dim, kinds, theta=THETA, local_theta=THETA)
    return replace(config, windows=windows_of_kinds(fields, kinds), ropes=ropes)
