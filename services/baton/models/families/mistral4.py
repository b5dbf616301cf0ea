"""Mistral Small 4 (https://mistral.ai/news/mistral-small-4): latent attention whose queries grow with their
position, and experts chosen by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ExpertsConfig, ModelConfig, QueryScale
from baton.models.expert_fields import either, fitting
from baton.models.families.deepseek_v2 import latent_like, read_latent
from baton.models.json_fields import Fields
from baton.models.mixer_config import LatentConfig
from baton.models.quantization.experts_format import GATE_UP
from baton_kernels.routing_rule import Routing

ROPE: Mapping[str, object] = MappingProxyType(
    {
        "type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)
"""The rotation of a config that has none."""


def read(fields: Fields) -> ModelConfig:
    """Read Mistral Small 4's config. ModelError if it is not one that Baton serves."""
    fields = _with_rope(fields)
    config = latent_like(fields, read_latent(fields, LatentConfig(1024, 256, 64, 64, 128)))
    rope, dense = fields.object("rope_parameters"), fields.integer("first_k_dense_replace", 0, minimum=0)
    beta, scale = rope.number_if_any("llama_4_scaling_beta"), None
    if beta is not None:
        scale = QueryScale(beta, rope.integer("original_max_position_embeddings"))
    return replace(
        config,
        query_scale=scale,
        experts=_experts(fields, config),
        expert_layers=tuple(layer >= dense for layer in range(config.num_layers)),
    )


def _with_rope(fields: Fields) -> Fields:
    """The config with a rotation that is told of the rotated part of a head alone: published ones say what
    share of a head that is."""
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    found = fields.get(name) if fields.has(name) else ROPE
    if not isinstance(found, Mapping):
        raise fields.error(name, "an object")
    rope = {field: value for field, value in found.items() if field != "partial_rotary_factor"}
    left = fields.without("rope_scaling", "rope_parameters", "partial_rotary_factor")
    return left.with_defaults({"rope_parameters": rope})


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig:
    number = fields.integer(either(fields, "n_routed_experts", "num_local_experts"), 128)
    inner = fields.integer("moe_intermediate_size", 2048)
    routing = Routing(
        fields.integer("num_experts_per_tok", 4),
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
    )
    return ExpertsConfig(
        num_experts=number,
        inner=inner,
        routing=fitting(fields, routing, number),
        names=GATE_UP,
        activation=config.activation,
        shared="shared_experts",
        shared_inner=inner * fields.integer("n_shared_experts", 1),
    )
