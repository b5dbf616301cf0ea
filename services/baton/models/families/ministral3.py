"""Ministral 3 (https://mistral.ai/news/mistral-3): Mistral with queries whose scale grows with their
position."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig, QueryScale
from baton.models.families import mistral, mistral4
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import one_window

DEFAULTS = MappingProxyType({"num_key_value_heads": 8, "head_dim": 128, "sliding_window": None})
"""The values of missing fields."""


def read(fields: Fields) -> ModelConfig:
    """Read Ministral 3's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults(DEFAULTS)
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    if not fields.has(name):
        raise fields.error(name, "an object")
    rope, scale = fields.object(name), None
    beta = rope.number_if_any("llama_4_scaling_beta")
    if beta is not None:
        scale = QueryScale(beta, rope.integer("original_max_position_embeddings"))
    config = llama_like(fields, default_eps=1e-5)
    return replace(config, windows=one_window(fields, config.num_layers), query_scale=scale)


def read_mistral3(fields: Fields) -> ModelConfig:
    """Read the config of Mistral 3's text model, which is a Mistral, a Ministral 3 or a Mistral Small 4.
    ModelError likewise."""
    match fields.text("model_type", "mistral"):
        case "mistral":
            return mistral.read(fields)
        case "ministral3":
            return read(fields)
        case "mistral4":
            return mistral4.read(fields)
        case _:
            raise fields.error("model_type", "one of mistral, ministral3, mistral4")
