"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434), from which the other families with latent attention
depart: experts behind some dense layers, chosen in groups by softmax."""

from __future__ import annotations

import math
from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig, RopeConfig
from baton.models.expert_fields import fitting
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.mixer_config import LatentConfig
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read DeepSeek-V2's config. ModelError if it is not one that Baton serves."""
    sizes = read_latent(fields, LatentConfig(1536, 512, 128, 64, 128))
    config = latent_like(fields, sizes, interleaved=True, mlp_bias=fields.flag("mlp_bias", False))
    number = fields.integer("n_routed_experts", 64)
    inner = fields.integer("moe_intermediate_size", 1407)
    fields.only("moe_layer_freq", 1)
    fields.only("norm_topk_prob", False)
    fields.only("scoring_func", "softmax")
    routing = _routing(fields)
    dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    return replace(
        config,
        experts=ExpertsConfig(
            num_experts=number,
            inner=inner,
            routing=fitting(fields, routing, number),
            activation=config.activation,
            router_float32=True,
            shared="shared_experts",
            shared_inner=inner * fields.integer("n_shared_experts", 2),
        ),
        expert_layers=tuple(layer >= dense for layer in range(config.num_layers)),
    )


def _routing(fields: Fields) -> Routing:
    top_k, scale = fields.integer("num_experts_per_tok"), fields.number("routed_scaling_factor", 1.0)
    match fields.text("topk_method", "greedy"):
        case "greedy":
            return Routing(top_k, scale=scale)
        case "group_limited_greedy":
            groups, top_groups = fields.integer("n_group"), fields.integer("topk_group")
            return Routing(top_k, scale=scale, groups=groups, top_groups=top_groups, group_best=1)
        case _:
            raise fields.error("topk_method", "one of greedy, group_limited_greedy")


def read_latent(fields: Fields, missing: LatentConfig) -> LatentConfig:
    """Read the sizes of latent attention. ``missing``: the values of missing fields; ``q_lora_rank`` may be
    null, which means that queries have no latent."""
    has_rank = not fields.is_null("q_lora_rank")
    sizes = LatentConfig(
        q_rank=fields.integer("q_lora_rank", missing.q_rank) if has_rank else None,
        kv_rank=fields.integer("kv_lora_rank", missing.kv_rank),
        nope_dim=fields.integer("qk_nope_head_dim", missing.nope_dim),
        rope_dim=fields.integer("qk_rope_head_dim", missing.rope_dim),
        value_dim=fields.integer("v_head_dim", missing.value_dim),
    )
    if sizes.rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    return sizes


def latent_like(
    fields: Fields,
    sizes: LatentConfig,
    *,
    interleaved: bool | None = None,
    mlp_bias: bool = False,
    default_eps: float = 1e-6,
    ties_embeddings: bool = False,
) -> ModelConfig:
    """Read the fields that the families with latent attention share; the caller replaces what differs.

    ``interleaved``: whether neighbouring dimensions are rotated together; None: ``rope_interleave`` says it,
    or they are. ``default_eps`` and ``ties_embeddings``: values of missing fields.
    """
    heads = fields.integer("num_attention_heads")
    if fields.has("num_key_value_heads") and fields.integer("num_key_value_heads") != heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads ({heads})")
    if interleaved is None:
        interleaved = fields.flag("rope_interleave", True)
    biased = fields.flag("attention_bias", False)
    # Angles are for the rotated part of a head, and every rank keeps the one latent.
    of_latent = {"head_dim": sizes.rope_dim, "num_key_value_heads": 1}
    config = llama_like(
        fields.without(*of_latent).with_defaults(of_latent),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=mlp_bias,
        interleaved_rotary=interleaved,
        default_eps=default_eps,
        ties_embeddings=ties_embeddings,
    )
    return replace(
        config,
        attention_scale=sizes.query_dim**-0.5 * _temperature(fields, config.rope) ** 2,
        mixers=(("latent",),) * config.num_layers,
        latent=sizes,
    )


def _temperature(fields: Fields, rope: RopeConfig) -> float:
    """The factor of queries and keys of a stretched context: 1 + 0.1 m ln(factor), where m is
    ``mscale_all_dim``."""
    found = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    scale = None if rope.kind == "default" else found.number_if_any("mscale_all_dim")
    return 1.0 if scale is None or rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0
