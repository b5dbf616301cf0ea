"""MiniCPM3 (https://github.com/OpenBMB/MiniCPM): latent attention in dense layers, with factors on
embeddings, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig
from baton.models.families.deepseek_v2 import latent_like, read_latent
from baton.models.json_fields import Fields
from baton.models.mixer_config import LatentConfig

DEFAULTS = MappingProxyType({"scale_depth": 1.4, "dim_model_base": 256})
"""The values of missing fields; null means that a factor is 1."""


def read(fields: Fields) -> ModelConfig:
    """Read MiniCPM3's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults(DEFAULTS)
    value_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    config = latent_like(
        fields,
        read_latent(fields, LatentConfig(768, 256, 64, 32, value_dim)),
        interleaved=False,
        mlp_bias=fields.flag("mlp_bias", False),
        default_eps=1e-5,
        ties_embeddings=True,
    )
    depth = fields.optional_number("scale_depth")
    base = fields.optional_number("dim_model_base")
    return replace(
        config,
        embedding_scale=fields.number("scale_emb", 12.0),
        residual_scale=1.0 if depth is None else depth / config.num_layers**0.5,
        logits_scale=1.0 if base is None else base / config.hidden_size,
    )
