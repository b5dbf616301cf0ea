"""Hy3 (https://huggingface.co/tencent/Hy3-preview): experts behind a dense layer, chosen by biased
sigmoids."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import draft_layers, either, fitting, mlp_layer_types
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read Hy3's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(
        fields,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
        default_head_dim=128,
        default_kv_heads=8,
        rope_theta=11_158_840.0,
        default_eps=1e-5,
    )
    dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    return replace(
        config,
        head_norm="heads",
        experts=_experts(fields, config),
        expert_layers=mlp_layer_types(fields, config.num_layers, dense=dense),
        ignored=draft_layers(fields, "num_nextn_predict_layers", 1, config.num_layers),
    )


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig:
    number = fields.integer(either(fields, "num_experts", "num_local_experts"), 192)
    inner = fields.integer("moe_intermediate_size", 1536)
    for flag in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        fields.only(flag, True)
    routing = Routing(
        fields.integer("num_experts_per_tok", 8),
        "sigmoid",
        renormalize=True,
        scale=fields.number("router_scaling_factor", 2.826),
    )
    return ExpertsConfig(
        num_experts=number,
        inner=inner,
        routing=fitting(fields, routing, number),
        activation=config.activation,
        router="router.gate",
        router_float32=True,
        correction_bias="expert_bias",
        shared="shared_mlp",
        shared_inner=inner * fields.integer("num_shared_experts", 1),
    )
