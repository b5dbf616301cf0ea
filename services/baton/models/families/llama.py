"""Llama (https://arxiv.org/abs/2302.13971), from which the other families depart."""

from __future__ import annotations

from baton.models.config import ModelConfig
from baton.models.json_fields import MOST_LAYERS, Fields
from baton.models.rope_fields import read_rope
from baton_kernels.activation_kind import GELU_TANH, SILU, Activation

ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
"""The activations by their names in config.json."""


def read(fields: Fields) -> ModelConfig:
    """Read Llama's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    return llama_like(fields, qkv_bias=biased, o_bias=biased, mlp_bias=fields.flag("mlp_bias", False))


def llama_like(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
    partial_rotary: float = 1.0,
    interleaved_rotary: bool = False,
    rope_theta: float = 10_000.0,
    eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    activation: str = "hidden_act",
    ties_embeddings: bool = False,
) -> ModelConfig:
    """Read the fields that most families share; the caller replaces what differs. No layer has a window.

    ``default_head_dim`` and ``default_kv_heads``: the values of missing fields (None: hidden_size /
    num_attention_heads, and the number of heads). ``partial_rotary``, ``rope_theta``, ``default_eps`` and
    ``ties_embeddings`` are such values, too. ``eps`` and ``activation`` are the names of these fields.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default_kv_heads or heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    fields.flag("attention_bias", False)  # refused if it is no flag, whatever the family makes of it
    layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    head_dim = _head_dim(fields, default_head_dim, heads)
    rope = read_rope(
        fields, head_dim, partial=partial_rotary, interleaved=interleaved_rotary, theta=rope_theta
    )
    return ModelConfig(
        architecture="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        ropes=(rope,) * layers,
        norm_eps=fields.number(eps, default_eps),
        windows=(None,) * layers,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=fields.flag("tie_word_embeddings", ties_embeddings),
        activation=read_activation(fields, activation),
    )


def read_activation(fields: Fields, name: str = "hidden_act") -> Activation:
    """The activation that the field ``name`` names; a missing one means silu, and null is refused."""
    found = ACTIVATIONS.get(fields.text(name, None if fields.is_null(name) else "silu"))
    if found is None:
        raise fields.error(name, "one of " + ", ".join(ACTIVATIONS))
    return found


def _head_dim(fields: Fields, default: int | None, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if not fields.has("head_dim") and default is None and hidden % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads}) without a head_dim")
    head_dim = fields.integer("head_dim", default or hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    return head_dim
