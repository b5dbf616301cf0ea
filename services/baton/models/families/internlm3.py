"""InternLM3 (https://github.com/InternLM/InternLM): Llama with other names for its biases."""

from __future__ import annotations

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields


def read(fields: Fields) -> ModelConfig:
    """Read InternLM3's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults({"num_key_value_heads": 2, "head_dim": 128})
    biased = _flag(fields, "qkv_bias", "attention_bias")
    if _flag(fields, "bias", "mlp_bias") != biased:
        raise fields.error("qkv_bias" if fields.has("qkv_bias") else "attention_bias", "the same as bias")
    return llama_like(fields, qkv_bias=biased, o_bias=biased, mlp_bias=biased, default_eps=1e-5)


def _flag(fields: Fields, name: str, newer: str) -> bool:
    """A flag by its published name or by transformers'."""
    return fields.flag(name if fields.has(name) else newer, False)
