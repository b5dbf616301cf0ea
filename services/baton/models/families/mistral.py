"""Mistral (https://arxiv.org/abs/2310.06825) and Ministral: Llama with a window in every layer, or in
some."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import layer_kinds, one_window, windows_of_kinds


def read(fields: Fields) -> ModelConfig:
    """Read Mistral's config. ModelError if it is not one that Baton serves."""
    config = llama_like(fields, default_kv_heads=8)
    if not fields.has("layer_types"):
        return replace(config, windows=one_window(fields, config.num_layers))
    kinds = layer_kinds(fields, config.num_layers, ())
    return replace(config, windows=windows_of_kinds(fields, kinds))
