"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models), dense: Llama with a factor each for
embeddings, attention scores, the residual stream and logits."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families import llama
from baton.models.json_fields import Fields


def read(fields: Fields) -> ModelConfig:
    """Read Granite's config. ModelError if it is not one that Baton serves."""
    return scaled(llama.read(fields), fields)


def scaled(config: ModelConfig, fields: Fields) -> ModelConfig:
    """The config with the factors of embeddings, scores, residual stream and logits."""
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )
