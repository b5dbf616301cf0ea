"""Qwen3 (https://arxiv.org/abs/2505.09388): Llama with queries and keys normalized per head."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import windows_by_layer_type


def read(fields: Fields) -> ModelConfig:
    """Read Qwen3's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased, default_head_dim=128)
    windows = windows_by_layer_type(fields, config.num_layers)
    return replace(config, windows=windows, head_norm="heads")
