"""Qwen2 (https://arxiv.org/abs/2407.10671): Llama with biases on queries, keys and values, and windows in
some layers."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import windows_by_layer_type


def read(fields: Fields) -> ModelConfig:
    """Read Qwen2's config. ModelError if it is not one that Baton serves."""
    config = llama_like(fields, qkv_bias=True)
    return replace(config, windows=windows_by_layer_type(fields, config.num_layers))
