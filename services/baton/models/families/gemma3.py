"""Gemma 3 (https://arxiv.org/abs/2503.19786): Gemma 2 with queries and keys normalized per head instead of
capped scores, and a rotary embedding of its own for the layers with a window."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig
from baton.models.families import gemma2
from baton.models.families.gemma2 import gemma_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import every_nth_sees_all, layer_kinds, windows_of_kinds
from baton.models.rope_fields import read_ropes_of_kinds

DEFAULTS = MappingProxyType(
    {
        **gemma2.DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }
)
"""The fields that published configs leave out."""


def read(fields: Fields) -> ModelConfig:
    """Read Gemma 3's config, of its text model. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults(DEFAULTS)
    fields.only("attn_logit_softcapping", None)
    config = gemma_like(fields.without("rope_scaling", "rope_parameters"))
    nth = fields.integer("sliding_window_pattern", 6)
    kinds = layer_kinds(fields, config.num_layers, every_nth_sees_all(config.num_layers, nth))
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    ropes = read_ropes_of_kinds(fields, config.head_dim, kinds, theta=1e6, local_theta=local_theta)
    return replace(config, windows=windows_of_kinds(fields, kinds), ropes=ropes, head_norm="heads")
