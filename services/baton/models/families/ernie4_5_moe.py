"""The mixtures of ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): experts in
some layers, chosen by biased probabilities; neighbouring dimensions are rotated together."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import either, fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read the config of an ERNIE 4.5 mixture. ModelError if it is not one that Baton serves."""
    biased = fields.flag("use_bias", False)
    config = llama_like(
        fields,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        default_kv_heads=4,
        interleaved_rotary=True,
        rope_theta=500_000.0,
        default_eps=1e-5,
        ties_embeddings=True,
    )
    if biased and config.tie_word_embeddings:
        raise fields.error("use_bias", "false with tie_word_embeddings")
    return replace(
        config,
        head_bias=biased,
        experts=_experts(fields, config),
        expert_layers=_expert_layers(fields, config.num_layers),
        ignored=(".mtp_",),
    )


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig:
    number = fields.integer(either(fields, "moe_num_experts", "num_experts"), 64)
    chosen = either(fields, "moe_k", "num_experts_per_tok")
    least = fields.number("moe_norm_min", 1e-12)
    routing = Routing(fields.integer(chosen, 6), renormalize=True, least_sum=least)
    inner = fields.integer("moe_intermediate_size", 1536)
    shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    return ExpertsConfig(
        num_experts=number,
        inner=inner,
        routing=fitting(fields, routing, number, chosen=chosen),
        activation=config.activation,
        router_float32=True,
        correction_bias="moe_statics.e_score_correction_bias",
        correction_rows=1,
        shared="shared_experts" if shared else "",
        shared_inner=inner * shared,
    )


def _expert_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: every ``moe_layer_interval``-th of those from
    ``moe_layer_start_index`` to ``moe_layer_end_index`` (-1: the last)."""
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    interval = fields.integer("moe_layer_interval", 1)
    end = num_layers if last == -1 else last + 1
    return tuple(first <= layer < end and (layer + 1) % interval == 0 for layer in range(num_layers))
