"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama with biases on queries, keys and values."""

from __future__ import annotations

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields


def read(fields: Fields) -> ModelConfig:
    """Read Seed-OSS's config. ModelError if it is not one that Baton serves."""
    return llama_like(
        fields.with_defaults({"num_key_value_heads": 8, "head_dim": 128}),
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )
