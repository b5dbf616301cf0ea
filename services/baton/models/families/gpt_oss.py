"""gpt-oss (https://arxiv.org/abs/2508.10925): experts in every layer, windows in every other one, and a sink
for each head."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig, RopeConfig
from baton.models.expert_fields import either, fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import alternating_windows
from baton.models.quantization.experts_format import INTERLEAVED
from baton_kernels.activation_kind import ALPHA, Activation
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read gpt-oss' config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", True)
    config = llama_like(
        fields,
        qkv_bias=biased,
        o_bias=biased,
        default_head_dim=64,
        default_kv_heads=8,
        rope_theta=150_000.0,
        default_eps=1e-5,
    )
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        config = replace(config, ropes=(_stretched(config.rope.theta),) * config.num_layers)
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 128)
    number = fields.integer(either(fields, "num_local_experts", "num_experts"), 128)
    routing = Routing(fields.integer("num_experts_per_tok", 4), renormalize=True)
    fields.only("swiglu_alpha", ALPHA)
    return replace(
        config,
        windows=alternating_windows(fields, config.num_layers, window),
        sinks=True,
        experts=ExpertsConfig(
            num_experts=number,
            inner=config.intermediate_size,
            routing=fitting(fields, routing, number),
            names=INTERLEAVED,
            activation=Activation("clamped_swiglu", fields.number("swiglu_limit", 7.0)),
            bias=True,
            router="router",
            router_bias=True,
        ),
        expert_layers=(True,) * config.num_layers,
    )


def _stretched(theta: float) -> RopeConfig:
    """The rotary embedding of a config that names none."""
    return RopeConfig("yarn", theta, factor=32.0, original_max_positions=4096, truncate=False)
