"""Ring-linear 2.0 (https://arxiv.org/abs/2510.19338): lightning attention in most layers, grouped-query
attention in the others, and experts chosen by biased sigmoids in groups."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import draft_layers, fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.mixer_config import DeltaConfig
from baton_kernels.routing_rule import Routing

NAMES = (
    ("self_attn.qkv_proj", "attention.query_key_value"),
    ("self_attn.q_norm", "attention.query_layernorm"),
    ("self_attn.k_norm", "attention.key_layernorm"),
    ("self_attn.o_proj", "attention.dense"),
    ("linear_attn.", "attention."),
    ("embed_tokens", "word_embeddings"),
)
"""Baton's names, and the checkpoint's."""


def read(fields: Fields) -> ModelConfig:
    """Read Ring-linear's config. ModelError if it is not one that Baton serves."""
    for name in ("use_bias", "use_qkv_bias", "linear_silu", "use_linear_silu", "norm_head"):
        fields.only(name, False)
    fields.only("linear_rope", True)
    config = llama_like(fields, rope_theta=600_000.0)
    layers, size = config.num_layers, fields.integer("layer_group_size")
    if layers < 2:
        raise fields.error("num_hidden_layers", "at least 2, as rates of decay follow from it")
    groups = fields.integer("group_norm_size", 1)
    if config.num_heads % groups:
        raise fields.error("group_norm_size", f"a divisor of num_attention_heads ({config.num_heads})")
    dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    whole = layers // size * size
    full = [(layer + 1) % size == 0 or layer >= whole for layer in range(layers)]
    return replace(
        config,
        head_norm="heads" if fields.flag("use_qk_norm", False) else None,
        fused_qkv=True,
        mixers=tuple(("attention",) if sees_all else ("delta",) for sees_all in full),
        delta=DeltaConfig(
            "lightning",
            key_heads=config.num_heads,
            value_heads=config.num_heads,
            key_dim=config.head_dim,
            value_dim=config.head_dim,
            conv_kernel=0,
            gate="sigmoid",
            norm_groups=groups,
        ),
        experts=_experts(fields, config),
        expert_layers=tuple(layer >= dense for layer in range(layers)),
        names=NAMES,
        ignored=draft_layers(fields, "num_nextn_predict_layers", 0, layers),
    )


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig:
    fields.only("score_function", "sigmoid")
    fields.only("moe_router_enable_expert_bias", True)
    number, inner = fields.integer("num_experts"), fields.integer("moe_intermediate_size")
    routing = Routing(
        fields.integer("num_experts_per_tok"),
        "sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
    )
    shared = fields.integer("moe_shared_expert_intermediate_size", inner)
    return ExpertsConfig(
        num_experts=number,
        inner=inner,
        routing=fitting(fields, routing, number),
        activation=config.activation,
        router_float32=True,
        correction_bias="gate.expert_bias",
        shared="shared_experts",
        shared_inner=shared * fields.integer("num_shared_experts", 1),
    )
