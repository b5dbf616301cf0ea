"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3 with experts."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import either, fitting, sparse_layers
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import one_window
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read Qwen3-MoE's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased, default_kv_heads=4)
    number = fields.integer(either(fields, "num_experts", "num_local_experts"), 128)
    renormalize = fields.flag("norm_topk_prob", False)
    routing = Routing(fields.integer("num_experts_per_tok", 8), renormalize=renormalize)
    slides = fields.flag("use_sliding_window", False)
    return replace(
        config,
        windows=one_window(fields, config.num_layers) if slides else config.windows,
        head_norm="heads",
        experts=ExpertsConfig(
            num_experts=number,
            inner=fields.integer("moe_intermediate_size", 768),
            routing=fitting(fields, routing, number),
            activation=config.activation,
        ),
        expert_layers=sparse_layers(fields, config.num_layers),
    )
