"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.quantization.experts_format import NUMBERED
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read Mixtral's config. ModelError if it is not one that Baton serves."""
    config = llama_like(fields, default_kv_heads=8, rope_theta=1e6, default_eps=1e-5)
    number = fields.integer("num_local_experts", 8)
    routing = Routing(fields.integer("num_experts_per_tok", 2), renormalize=True)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return replace(
        config,
        windows=(window,) * config.num_layers,
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
