"""Qwen3.5 to Qwen3.8, of images and text: Qwen3-Next with its projections apart, with experts or without.

The three parts of the rotary positions (time, height, width) are one number in text, so all of a head is
rotated by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig
from baton.models.families.qwen3_next import gated_experts, with_delta_nets
from baton.models.json_fields import Fields
from baton.models.quantization.experts_format import GATE_UP

DENSE_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"intermediate_size": 12_288, "num_key_value_heads": 4, "num_hidden_layers": 32}
)
MOE_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 40,
    }
)
"""The fields that a config may leave out."""


def read(fields: Fields) -> ModelConfig:
    """Read the config of a dense text model. ModelError if it is not one that Baton serves."""
    return with_delta_nets(fields.with_defaults(DENSE_DEFAULTS), "joined")


def read_moe(fields: Fields) -> ModelConfig:
    """Read the config of a text model of experts, which are in every layer. ModelError if it is not one that
    Baton serves."""
    fields = fields.with_defaults(MOE_DEFAULTS)
    config = with_delta_nets(fields, "joined")
    experts = replace(gated_experts(fields.without("norm_topk_prob"), config), other_names=GATE_UP)
    return replace(config, experts=experts, expert_layers=(True,) * config.num_layers)
