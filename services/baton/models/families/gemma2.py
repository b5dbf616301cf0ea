"""Gemma 2 (https://arxiv.org/abs/2408.00118): norms in front of and behind attention and MLP, their weights
counted from 1, scaled embeddings, capped scores and logits, and a window in every other layer."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.layer_windows import every_nth_sees_all, layer_kinds, windows_of_kinds

DEFAULTS = MappingProxyType(
    {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
)
"""The fields that published configs leave out."""
NAMES = (
    (".post_self_attn_layernorm.", ".post_attention_layernorm."),
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
)


def read(fields: Fields) -> ModelConfig:
    """Read Gemma 2's config. ModelError if it is not one that Baton serves."""
    fields = fields.with_defaults(DEFAULTS)
    fields.only("sliding_window_pattern", 2)
    config = gemma_like(fields)
    kinds = layer_kinds(fields, config.num_layers, every_nth_sees_all(config.num_layers, 2))
    return replace(
        config,
        windows=windows_of_kinds(fields, kinds),
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
    )


def gemma_like(fields: Fields) -> ModelConfig:
    """Read the fields that the Gemmas share; the caller replaces the windows. ModelError."""
    fields.only("use_bidirectional_attention", False)
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased, activation="hidden_activation")
    return replace(
        config,
        names=NAMES,
        norm_offset=1.0,
        norm_places="around",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logits_softcap=fields.optional_number("final_logit_softcapping"),
    )
