"""StarCoder 2 (https://arxiv.org/abs/2402.19173): layer norms with biases, an MLP without a gate, and a
window."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import one_window

DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
        "tie_word_embeddings": True,
    }
)
"""The values of missing fields."""


def read(fields: Fields) -> ModelConfig:
    """Read StarCoder 2's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults(DEFAULTS)
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    biased = fields.flag("use_bias", True)
    config = llama_like(
        fields, qkv_bias=biased, o_bias=biased, mlp_bias=biased, eps="norm_epsilon", default_eps=1e-5
    )
    return replace(
        config,
        names=((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj.")),
        windows=one_window(fields, config.num_layers),
        layer_norm=True,
        norm_bias=True,
        gated_mlp=False,
    )
