"""Phi-3 (https://arxiv.org/abs/2404.14219) and Phi-4: Llama with fused projections, some with longrope, a
window or heads that are rotated in part."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import one_window


def read(fields: Fields) -> ModelConfig:
    """Read Phi-3's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults({"sliding_window": None, "original_max_position_embeddings": 4096})
    config = llama_like(fields, default_eps=1e-5)
    if config.rope.kind not in ("default", "longrope"):
        rope = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
        raise rope.error("rope_type" if rope.has("rope_type") else "type", "default or longrope")
    windows = one_window(fields, config.num_layers)
    return replace(config, windows=windows, fused_qkv=True, fused_gate_up=True)
