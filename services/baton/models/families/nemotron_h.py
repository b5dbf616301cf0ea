"""Nemotron-H (https://arxiv.org/abs/2504.03624) and Nemotron 3: each layer is one of Mamba-2, attention
without positions, an MLP without a gate, or experts without gates."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.mamba_fields import time_step_limits
from baton.models.mixer_config import MambaConfig, MixerKind, mamba_units
from baton_kernels.activation_kind import RELU2
from baton_kernels.routing_rule import Routing

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""The kinds of layers by their letters in ``hybrid_override_pattern``."""
KINDS = {
    **{kind: kind for kind in PATTERN.values()},
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""The kinds of layers by their names in ``layers_block_type``, old ones and new ones."""
MIXERS: dict[str, tuple[MixerKind, ...]] = {
    "linear_attention": ("mamba",),
    "full_attention": ("attention",),
    "mlp": (),
    "moe": (),
}
NAMES = (
    (".mamba.", ".mixer."),
    (".self_attn.", ".mixer."),
    (".mlp.", ".mixer."),
    (".input_layernorm.", ".norm."),
    (".post_attention_layernorm.", ".norm."),
    ("model.embed_tokens.", "model.embeddings."),
    ("model.norm.", "model.norm_f."),
)


def read(fields: Fields) -> ModelConfig:
    """Read Nemotron-H's config. ModelError if it is not one that Baton serves."""
    kinds = _kinds(fields)
    own = fields.without("num_hidden_layers").with_defaults({"num_hidden_layers": len(kinds)})
    config = llama_like(
        own,
        mlp_bias=fields.flag("mlp_bias", False),
        default_head_dim=128,
        default_kv_heads=None if fields.is_null("num_key_value_heads") else 8,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
    )
    fields.only("attention_head_dim", config.head_dim)
    fields.only("mlp_hidden_act", "relu2")
    fields.only("tie_word_embeddings", False)
    layers = len(kinds)
    config = replace(
        config,
        ropes=(None,) * layers,
        activation=RELU2,
        gated_mlp=False,
        mixers=tuple(MIXERS[kind] for kind in kinds),
        mlps=tuple(not MIXERS[kind] for kind in kinds),
        mamba=_mamba(fields),
        names=NAMES,
        ignored=("mtp.",),
    )
    if "moe" not in kinds:
        return config
    return replace(config, experts=_experts(fields), expert_layers=tuple(kind == "moe" for kind in kinds))


def _kinds(fields: Fields) -> tuple[str, ...]:
    """The kind of each layer."""
    name = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
    if fields.has(name):
        found = fields.get(name)
        if not isinstance(found, list) or not found or not {*KINDS}.issuperset(found):
            raise fields.error(name, "a list of " + ", ".join(KINDS))
        return tuple(KINDS[kind] for kind in found)
    pattern = fields.text("hybrid_override_pattern")
    if not pattern or not {*PATTERN}.issuperset(pattern):
        raise fields.error("hybrid_override_pattern", "one or more of " + ", ".join(PATTERN))
    return tuple(PATTERN[letter] for letter in pattern)


def _mamba(fields: Fields) -> MambaConfig:
    """The Mamba-2 layers. Time steps have the limits that the config names, as in the authors' code; those of
    transformers are at least ``time_step_min`` in prompts, and anything behind them."""
    heads, groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if heads % groups:
        raise fields.error("n_groups", f"a divisor of mamba_num_heads ({heads})")
    fields.only("mamba_hidden_act", "silu")
    bias = fields.flag("use_bias", False)
    return MambaConfig(
        heads=heads,
        head_dim=fields.integer("mamba_head_dim", 64),
        groups=groups,
        state_dim=fields.integer("ssm_state_size", 128),
        conv_kernel=fields.integer("conv_kernel", 4, minimum=2),
        units=mamba_units(heads, groups),
        conv_bias=fields.flag("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        dt_limits=time_step_limits(fields),
    )


def _experts(fields: Fields) -> ExpertsConfig:
    number = fields.integer("n_routed_experts", 8)
    routing = Routing(
        fields.integer("num_experts_per_tok", 2),
        "sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
    )
    fields.only("n_shared_experts", 1)
    latent = fields.integer("moe_latent_size", 0, minimum=0)
    return ExpertsConfig(
        num_experts=number,
        inner=fields.integer("moe_intermediate_size", 7688),
        routing=fitting(fields, routing, number),
        activation=RELU2,
        gated=False,
        router_float32=True,
        correction_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        shared_inner=fields.integer("moe_shared_expert_intermediate_size", 7688),
        latent=latent,
        latent_in="fc1_latent_proj",
        latent_out="fc2_latent_proj",
    )
