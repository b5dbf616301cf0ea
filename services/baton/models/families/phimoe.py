"""Phi-3.5-MoE (https://arxiv.org/abs/2404.14219): two experts in every layer, chosen by sparsemixer, and
norms that subtract the mean."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.quantization.experts_format import NUMBERED
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read Phi-3.5-MoE's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(
        fields,
        qkv_bias=biased,
        o_bias=biased,
        default_kv_heads=8,
        rope_theta=1e6,
        default_eps=1e-5,
    )
    number = fields.integer("num_local_experts", 16)
    fields.only("num_experts_per_tok", 2)
    routing = Routing(2, "sparsemixer", jitter=fields.number("router_jitter_noise", 0.01))
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    head_bias = fields.flag("lm_head_bias", False)
    if head_bias and config.tie_word_embeddings:
        raise fields.error("lm_head_bias", "false with tie_word_embeddings")
    return replace(
        config,
        windows=(window,) * config.num_layers,
        layer_norm=True,
        norm_bias=True,
        head_bias=head_bias,
        experts=ExpertsConfig(
            num_experts=number,
            inner=config.intermediate_size,
            routing=fitting(fields, routing, number),
            names=NUMBERED,
            activation=config.activation,
        ),
        expert_layers=(True,) * config.num_layers,
        names=((".mlp.", ".block_sparse_moe."),),
    )
