"""Hunyuan's mixtures (https://arxiv.org/abs/2411.02265): experts and an MLP for every token in every layer;
queries and keys normalized per head behind the rotation."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import either, fitting, same_in_all_layers
from baton.models.families.hunyuan import normed_behind_rotation
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read a Hunyuan mixture's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased, default_eps=1e-5)
    _check_variants(fields)
    layers, inner = config.num_layers, config.intermediate_size
    number = same_in_all_layers(fields, "num_experts", 1, layers)
    if same_in_all_layers(fields, "moe_intermediate_size", inner, layers) != inner:
        raise fields.error("moe_intermediate_size", f"intermediate_size ({inner})")
    if same_in_all_layers(fields, "num_shared_expert", 1, layers) != 1:
        raise fields.error("num_shared_expert", "1")
    chosen = either(fields, "moe_topk", "num_experts_per_tok")
    routing = Routing(same_in_all_layers(fields, chosen, 1, layers), renormalize=True)
    return replace(
        normed_behind_rotation(fields, config),
        experts=ExpertsConfig(
            num_experts=number,
            inner=inner,
            routing=fitting(fields, routing, number, chosen=chosen),
            activation=config.activation,
            router="gate.wg",
            router_float32=True,
            shared="shared_mlp",
            shared_inner=inner,
        ),
        expert_layers=(True,) * layers,
    )


def _check_variants(fields: Fields) -> None:
    """Refuses what published configs may say beside transformers' fields, and no published mixture has."""
    for flag in ("use_qk_norm", "use_mixed_mlp_moe", "norm_topk_prob"):
        fields.only(flag, True)
    for flag in ("use_cla", "use_mla"):
        fields.only(flag, False)
    fields.only("moe_layer_num_skipped", 0)
    fields.only("routed_scaling_factor", 1)
