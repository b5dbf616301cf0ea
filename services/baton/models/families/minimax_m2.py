"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): experts in every layer, chosen by biased sigmoids;
queries and keys normalized over all heads and rotated in part."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import draft_layers, either, fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.quantization.experts_format import NUMBERED
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read MiniMax-M2's config. ModelError if it is not one that Baton serves."""
    head_dim = fields.integer("head_dim", 128)
    rotary_dim = fields.integer("rotary_dim", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise fields.error("rotary_dim", f"an even number up to head_dim ({head_dim})")
    config = llama_like(
        fields,
        default_head_dim=128,
        default_kv_heads=8,
        partial_rotary=rotary_dim / head_dim,
        rope_theta=5e6,
    )
    _check_variants(fields, config.num_layers)
    number = fields.integer(either(fields, "num_local_experts", "num_experts"), 256)
    routing = Routing(fields.integer("num_experts_per_tok", 8), "sigmoid", renormalize=True)
    return replace(
        config,
        head_norm="whole",
        experts=ExpertsConfig(
            num_experts=number,
            inner=config.intermediate_size,
            routing=fitting(fields, routing, number),
            names=NUMBERED,
            activation=config.activation,
            router_float32=True,
            correction_bias="e_score_correction_bias",
        ),
        expert_layers=(True,) * config.num_layers,
        names=((".mlp.", ".block_sparse_moe."),),
        ignored=draft_layers(fields, "num_mtp_modules", 0, config.num_layers),
    )


def _check_variants(fields: Fields, num_layers: int) -> None:
    """Refuses what published configs may say beside transformers' fields, and no published model has."""
    fields.only("use_qk_norm", True)
    fields.only("qk_norm_type", "per_layer")
    fields.only("scoring_func", "sigmoid")
    fields.only("use_routing_bias", True)
    fields.only("shared_intermediate_size", 0)
    if fields.has("attn_type_list") and fields.get("attn_type_list") != [1] * num_layers:
        raise fields.error("attn_type_list", f"{num_layers} times 1")
