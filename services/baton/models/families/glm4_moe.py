"""GLM-4.5 to GLM-4.7 (https://arxiv.org/abs/2508.06471): experts behind some dense layers, chosen by biased
sigmoids, in groups."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import draft_layers, either, fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read GLM-4.5's config. ModelError if it is not one that Baton serves."""
    config = llama_like(
        fields,
        qkv_bias=fields.flag("attention_bias", False),
        default_kv_heads=8,
        partial_rotary=0.5,
        default_eps=1e-5,
    )
    layers, dense = config.num_layers, fields.integer("first_k_dense_replace", 1, minimum=0)
    draft = either(fields, "num_nextn_predict_layers", "num_mtp_layers")
    return replace(
        config,
        head_norm="heads" if fields.flag("use_qk_norm", False) else None,
        experts=_experts(fields, config),
        expert_layers=tuple(layer >= dense for layer in range(layers)),
        ignored=draft_layers(fields, draft, 1, layers),
    )


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig:
    number = fields.integer(either(fields, "n_routed_experts", "num_local_experts"), 128)
    inner = fields.integer("moe_intermediate_size", 1408)
    routing = Routing(
        fields.integer("num_experts_per_tok", 8),
        "sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
    )
    fields.only("scoring_func", "sigmoid")
    return ExpertsConfig(
        num_experts=number,
        inner=inner,
        routing=fitting(fields, routing, number),
        activation=config.activation,
        router_float32=True,
        correction_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        shared_inner=inner * fields.integer("n_shared_experts", 1),
    )
