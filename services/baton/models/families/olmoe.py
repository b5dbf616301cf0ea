"""OLMoE (https://arxiv.org/abs/2409.02060): experts in every layer; queries and keys normalized over all
heads."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import either, fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read OLMoE's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased, default_eps=1e-5)
    if fields.has("clip_qkv"):
        raise fields.error("clip_qkv", "null (queries, keys and values are not clipped)")
    if config.head_dim * config.num_heads != config.hidden_size:
        raise fields.error("head_dim", f"hidden_size / num_attention_heads ({config.num_heads})")
    number = fields.integer(either(fields, "num_experts", "num_local_experts"), 64)
    renormalize = fields.flag("norm_topk_prob", False)
    routing = Routing(fields.integer("num_experts_per_tok", 8), renormalize=renormalize)
    return replace(
        config,
        head_norm="whole",
        experts=ExpertsConfig(
            num_experts=number,
            inner=config.intermediate_size,
            routing=fitting(fields, routing, number),
            activation=config.activation,
        ),
        expert_layers=(True,) * config.num_layers,
    )
