"""Qwen2-MoE (https://arxiv.org/abs/2407.10671): Qwen2 with experts, and an MLP for every token that a gate
scales."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting, sparse_layers
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import layer_kinds
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read Qwen2-MoE's config. ModelError if it is not one that Baton serves."""
    config = llama_like(fields, qkv_bias=fields.flag("qkv_bias", True), default_kv_heads=16)
    number = fields.integer("num_experts", 60)
    renormalize = fields.flag("norm_topk_prob", False)
    routing = Routing(fields.integer("num_experts_per_tok", 4), renormalize=renormalize)
    return replace(
        config,
        windows=_windows(fields, config.num_layers),
        experts=ExpertsConfig(
            num_experts=number,
            inner=fields.integer("moe_intermediate_size", 1408),
            routing=fitting(fields, routing, number),
            activation=config.activation,
            shared="shared_expert",
            shared_inner=fields.integer("shared_expert_intermediate_size", 5632),
            shared_gate="shared_expert_gate",
        ),
        expert_layers=sparse_layers(fields, config.num_layers),
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """``sliding_window`` in the layers that ``layer_types`` names, or, without it, in every other layer up to
    ``max_window_layers``, and in no layer unless ``use_sliding_window``."""
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    last = fields.integer("max_window_layers", 28, minimum=0)
    slides = [window is not None and layer % 2 == 0 and layer < last for layer in range(num_layers)]
    default = ["sliding_attention" if slide else "full_attention" for slide in slides]
    kinds = layer_kinds(fields, num_layers, default)
    if "sliding_attention" in kinds and window is None:
        raise fields.error("layer_types", "full_attention only, unless use_sliding_window is true")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
