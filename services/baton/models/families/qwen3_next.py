"""Qwen3-Next (https://qwen.ai/blog?id=qwen3-next): Qwen3-MoE in which three of four layers are gated delta
nets (https://arxiv.org/abs/2412.06464), and attention's output has a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting, sparse_layers
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import FULL, every_nth_sees_all, layer_kinds
from baton.models.mixer_config import DeltaConfig, DeltaNames
from baton_kernels.routing_rule import Routing

LINEAR = "linear_attention"
"""The layers that are gated delta nets, by their name in ``layer_types``."""
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
)
"""The fields that a config may leave out."""


def read(fields: Fields) -> ModelConfig:
    """Read Qwen3-Next's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults(DEFAULTS)
    config = with_delta_nets(fields, "grouped")
    sparse = sparse_layers(fields, config.num_layers)
    return replace(config, experts=gated_experts(fields, config), expert_layers=sparse)


def with_delta_nets(fields: Fields, names: DeltaNames) -> ModelConfig:
    """Read what Qwen3-Next and the models after it share."""
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", "true")
    biased = fields.flag("attention_bias", False)
    config = llama_like(
        fields.with_defaults({"intermediate_size": 5632, "max_position_embeddings": 32_768}),
        qkv_bias=biased,
        o_bias=biased,
        default_head_dim=256,
        default_kv_heads=2,
        partial_rotary=0.25,
    )
    nth = fields.integer("full_attention_interval", 4)
    kinds = layer_kinds(fields, config.num_layers, _kinds(config.num_layers, nth), LINEAR)
    return replace(
        config,
        head_norm="heads",
        norm_offset=1.0,
        attention_gate=True,
        mixers=tuple(("attention",) if kind == FULL else ("delta",) for kind in kinds),
        delta=_delta(fields, names),
        ignored=("mtp.", "visual."),
    )


def _kinds(num_layers: int, nth: int) -> tuple[str, ...]:
    return tuple(FULL if kind == FULL else LINEAR for kind in every_nth_sees_all(num_layers, nth))


def _delta(fields: Fields, names: DeltaNames) -> DeltaConfig:
    keys, values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if values % keys:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({keys})")
    return DeltaConfig(
        "gdn",
        key_heads=keys,
        value_heads=values,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4),
        names=names,
    )


def gated_experts(fields: Fields, config: ModelConfig) -> ExpertsConfig:
    """Read the experts, and the MLP for every token that a gate scales."""
    number = fields.integer("num_experts")
    renormalize = fields.flag("norm_topk_prob", True)
    routing = Routing(fields.integer("num_experts_per_tok"), renormalize=renormalize)
    return ExpertsConfig(
        num_experts=number,
        inner=fields.integer("moe_intermediate_size"),
        routing=fitting(fields, routing, number),
        activation=config.activation,
        shared="shared_expert",
        shared_inner=fields.integer("shared_expert_intermediate_size"),
        shared_gate="shared_expert_gate",
    )
