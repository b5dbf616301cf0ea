"""The language model of Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence): experts in some
layers; runs of tokens that see each other in rotated layers, all tokens in the others."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig, QueryScale
from baton.models.expert_fields import fitting, layer_numbers
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import layer_kinds
from baton.models.quantization.experts_format import TRANSPOSED
from baton_kernels.routing_rule import Routing
from baton_kernels.window import ChunkedWindow


def read(fields: Fields) -> ModelConfig:
    """Read the config of Llama 4's language model. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(
        fields,
        qkv_bias=biased,
        o_bias=biased,
        default_head_dim=128,
        default_kv_heads=8,
        interleaved_rotary=True,
        rope_theta=500_000.0,
        default_eps=1e-5,
    )
    layers, inner = config.num_layers, config.intermediate_size
    rotated = _rotated_layers(fields, layers)
    number = fields.integer("num_local_experts", 16)
    routing = Routing(fields.integer("num_experts_per_tok", 1), "sigmoid", weighs_input=True)
    return replace(
        config,
        intermediate_size=fields.integer("intermediate_size_mlp", 16384),
        ropes=tuple(config.rope if rotates else None for rotates in rotated),
        windows=_windows(fields, rotated),
        head_norm="plain" if fields.flag("use_qk_norm", True) else None,
        query_scale=_query_scale(fields),
        experts=ExpertsConfig(
            num_experts=number,
            inner=inner,
            routing=fitting(fields, routing, number),
            names=TRANSPOSED,
            activation=config.activation,
            router="router",
            shared="shared_expert",
            shared_inner=inner,
        ),
        expert_layers=_expert_layers(fields, layers),
        names=((".mlp.", ".feed_forward."),),
    )


def _rotated_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer rotates queries and keys: ``no_rope_layers`` has 1 for those that do. Without it,
    every ``no_rope_layer_interval``-th layer does not."""
    found = fields.get("no_rope_layers")
    if not found:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(found, list) or len(found) < num_layers or not {0, 1}.issuperset(found):
        raise fields.error("no_rope_layers", f"{num_layers} times 0 or 1")
    return [bool(rotates) for rotates in found[:num_layers]]


def _windows(fields: Fields, rotated: list[bool]) -> tuple[ChunkedWindow | None, ...]:
    """A run of ``attention_chunk_size`` tokens in the layers that ``layer_types`` names, or, without it, in
    those that rotate."""
    default = ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
    kinds = layer_kinds(fields, len(rotated), default, "chunked_attention")
    if "chunked_attention" not in kinds:
        return (None,) * len(kinds)
    none = fields.is_null("attention_chunk_size")
    window = ChunkedWindow(fields.integer("attention_chunk_size", None if none else 8192))
    return tuple(window if kind == "chunked_attention" else None for kind in kinds)


def _query_scale(fields: Fields) -> QueryScale | None:
    # Published configs have 4 where they mean true.
    if fields.get("attn_temperature_tuning") != 4 and not fields.flag("attn_temperature_tuning", True):
        return None
    scale, period = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    return QueryScale(scale, period, shift=1, unrotated_only=True)


def _expert_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: ``moe_layers``, or, without it, every
    ``interleave_moe_layer_step``-th."""
    if fields.has("moe_layers"):
        listed = layer_numbers(fields, "moe_layers", num_layers)
        return tuple(layer in listed for layer in range(num_layers))
    step = fields.integer("interleave_moe_layer_step", 1)
    return tuple((layer + 1) % step == 0 for layer in range(num_layers))
