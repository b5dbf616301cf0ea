"""LFM2 (https://arxiv.org/abs/2511.23404): gated short convolutions in most layers, attention in some; dense
or with experts behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting, layer_numbers
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import FULL, layer_kinds
from baton.models.mixer_config import ConvConfig, MixerKind
from baton.models.quantization.experts_format import NUMBERED
from baton_kernels.routing_rule import Routing

CONV = "conv"
MOST_UNITS = 8
NAMES = (
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".self_attn.q_norm.", ".self_attn.q_layernorm."),
    (".self_attn.k_norm.", ".self_attn.k_layernorm."),
    (".input_layernorm.", ".operator_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".mlp.", ".feed_forward."),
    ("model.norm.", "model.embedding_norm."),
)


def read(fields: Fields) -> ModelConfig:
    """Read LFM2's config. ModelError if it is not one that Baton serves."""
    name = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"
    config = _read(fields.with_defaults({"intermediate_size": fields.integer(name)}))
    return replace(config, intermediate_size=_inner(fields, fields.integer(name)))


def read_moe(fields: Fields) -> ModelConfig:
    """Read the config of LFM2 with experts. ModelError likewise."""
    config = _read(fields)
    number, dense = fields.integer("num_experts", 32), fields.integer("num_dense_layers", 2, minimum=0)
    routing = Routing(
        fields.integer("num_experts_per_tok", 4),
        "sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    experts = ExpertsConfig(
        num_experts=number,
        inner=fields.integer("moe_intermediate_size", 1792),
        routing=fitting(fields, routing, number),
        names=NUMBERED,
        correction_bias="expert_bias" if fields.flag("use_expert_bias", True) else "",
    )
    return replace(
        config, experts=experts, expert_layers=tuple(layer >= dense for layer in range(config.num_layers))
    )


def _read(fields: Fields) -> ModelConfig:
    config = llama_like(
        fields,
        default_kv_heads=8,
        rope_theta=1e6,
        eps="norm_eps",
        default_eps=1e-5,
        ties_embeddings=fields.flag("tie_embedding", True),
    )
    size = config.hidden_size
    return replace(
        config,
        head_norm="heads",
        mixers=_mixers(fields, config.num_layers),
        conv=ConvConfig(
            channels=size,
            conv_kernel=fields.integer("conv_L_cache", 3, minimum=2),
            units=gcd(size, MOST_UNITS),
            bias=fields.flag("conv_bias", False),
        ),
        names=NAMES,
    )


def _mixers(fields: Fields, num_layers: int) -> tuple[tuple[MixerKind, ...], ...]:
    attention = layer_numbers(fields, "full_attn_idxs", num_layers)
    if not fields.has("full_attn_idxs"):
        attention = frozenset(range(num_layers))
    by_number = [FULL if layer in attention else CONV for layer in range(num_layers)]
    kinds = layer_kinds(fields, num_layers, by_number, CONV)
    return tuple(("conv",) if kind == CONV else ("attention",) for kind in kinds)


def _inner(fields: Fields, size: int) -> int:
    """The rows of each MLP."""
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if size < 1:
        raise fields.error("intermediate_size", "a whole number of at least 2, of which two thirds are taken")
    if fields.is_null("block_ffn_dim_multiplier"):
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple
