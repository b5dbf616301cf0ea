"""Kimi-Linear (https://arxiv.org/abs/2510.26692): Kimi delta attention in three of four layers, latent
attention without rotary positions in the others, and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from baton.models.config import ModelConfig
from baton.models.expert_fields import mlp_layer_types
from baton.models.families.deepseek_v2 import latent_like, read_latent
from baton.models.families.deepseek_v3 import biased_experts
from baton.models.families.qwen3_next import LINEAR
from baton.models.json_fields import Fields
from baton.models.layer_windows import FULL, layer_kinds
from baton.models.mixer_config import DeltaConfig, LatentConfig
from baton.models.quantization.experts_format import NUMBERED
from baton_kernels.routing_rule import Routing

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "scoring_func": "moe_router_activation_func",
    }
)
"""DeepSeek-V3's fields, and Kimi-Linear's names of them."""
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "max_position_embeddings": 1_048_576,
        "q_lora_rank": None,
    }
)
"""The fields that a config may leave out."""


def read(fields: Fields) -> ModelConfig:
    """Read Kimi-Linear's config. ModelError if it is not one that Baton serves."""
    named = {ours: fields.get(theirs) for ours, theirs in OTHER_NAMES.items() if fields.has(theirs)}
    fields = fields.with_defaults({**DEFAULTS, **named})
    fields.only("mla_use_nope", True)
    fields.only("moe_layer_freq", 1)
    config = latent_like(fields, read_latent(fields, LatentConfig(None, 512, 128, 64, 128)), default_eps=1e-5)
    layers, dense = config.num_layers, fields.integer("first_k_dense_replace", 1, minimum=0)
    own = fields.object("linear_attn_config")
    kinds = _published_kinds(own, layers) or layer_kinds(fields, layers, _kinds(layers), LINEAR)
    routing = Routing(8, "sigmoid", scale=2.446)
    experts = biased_experts(fields, config, routing, num_experts=256, inner=1024)
    return replace(
        config,
        ropes=(None,) * layers,
        mixers=tuple(("latent",) if kind == FULL else ("delta",) for kind in kinds),
        delta=_delta(fields, own),
        experts=replace(experts, names=NUMBERED),
        expert_layers=mlp_layer_types(fields, layers, dense=dense),
        names=(
            ("linear_attn.", "self_attn."),
            *(
                (f"mlp.{part}.", f"block_sparse_moe.{part}.")
                for part in ("gate", "experts", "shared_experts")
            ),
        ),
    )


def _delta(fields: Fields, own: Fields) -> DeltaConfig:
    """``own``: the object that has the sizes in published configs."""
    heads = own.integer("num_heads", fields.integer("linear_num_heads", 32))
    dim = own.integer("head_dim", fields.integer("linear_head_dim", 128))
    kernel = own.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4))
    return DeltaConfig(
        "kda",
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_kernel=kernel,
        gate="sigmoid",
        low_rank=dim,
        flat_rates=False,
    )


def _kinds(num_layers: int) -> tuple[str, ...]:
    return tuple(FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers))


def _published_kinds(own: Fields, num_layers: int) -> tuple[str, ...]:
    """The kinds by two lists of layers, numbered from 1; none without the lists."""
    if not own.has("full_attn_layers") or not own.has("kda_layers"):
        return ()
    full, linear = own.get("full_attn_layers"), own.get("kda_layers")
    wanted = [*range(1, num_layers + 1)]
    if not isinstance(full, list) or not isinstance(linear, list) or sorted([*full, *linear]) != wanted:
        raise own.error("kda_layers", f"with full_attn_layers, each of the layers 1 to {num_layers} once")
    return tuple(FULL if layer in full else LINEAR for layer in wanted)
