"""ERNIE 4.5 (https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), dense: Llama whose heads
are rotated by neighbours."""

from __future__ import annotations

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields


def read(fields: Fields) -> ModelConfig:
    """Read ERNIE 4.5's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("use_bias", False)
    return llama_like(
        fields.with_defaults({"num_key_value_heads": 2, "head_dim": 128}),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        interleaved_rotary=True,
        rope_theta=500_000.0,
        default_eps=1e-5,
        ties_embeddings=True,
    )
