"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437), which R1 and Kimi-K2 are, too: DeepSeek-V2 with experts
chosen by biased sigmoids. Youtu-LLM has its attention without experts."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import draft_layers, either, fitting, mlp_layer_types
from baton.models.families.deepseek_v2 import latent_like, read_latent
from baton.models.json_fields import Fields
from baton.models.mixer_config import LatentConfig
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read DeepSeek-V3's config. ModelError if it is not one that Baton serves."""
    config = latent_like(fields, read_latent(fields, LatentConfig(1536, 512, 128, 64, 128)))
    fields.only("moe_layer_freq", 1)
    layers, dense = config.num_layers, fields.integer("first_k_dense_replace", 3, minimum=0)
    draft = either(fields, "num_nextn_predict_layers", "num_mtp_layers")
    return replace(
        config,
        experts=biased_experts(
            fields,
            config,
            Routing(8, "sigmoid", scale=2.5, groups=8, top_groups=4),
            num_experts=256,
            inner=2048,
        ),
        expert_layers=tuple(layer >= dense for layer in range(layers)),
        ignored=draft_layers(fields, draft, 1, layers),
    )


def read_glm4_moe_lite(fields: Fields) -> ModelConfig:
    """Read the config of GLM-4.7-Flash. ModelError likewise."""
    sizes = read_latent(fields, LatentConfig(768, 512, 192, 64, 256))
    config = latent_like(fields, sizes, default_eps=1e-5)
    fields.only("first_k_dense_replace", 1)
    return replace(
        config,
        experts=biased_experts(fields, config, Routing(4, "sigmoid", scale=1.8), num_experts=64, inner=1536),
        expert_layers=mlp_layer_types(fields, config.num_layers, dense=1),
        ignored=draft_layers(fields, "num_nextn_predict_layers", 1, config.num_layers),
    )


def read_youtu(fields: Fields) -> ModelConfig:
    """Read Youtu-LLM's config. ModelError likewise."""
    sizes = read_latent(fields, LatentConfig(1536, 512, 128, 64, 128))
    return latent_like(fields, sizes, ties_embeddings=True)


def biased_experts(
    fields: Fields, config: ModelConfig, missing: Routing, *, num_experts: int, inner: int
) -> ExpertsConfig:
    """Read experts that are chosen by biased sigmoids, in groups. ``missing``, ``num_experts`` and ``inner``:
    the values of missing fields."""
    number = fields.integer(either(fields, "n_routed_experts", "num_local_experts"), num_experts)
    inner = fields.integer("moe_intermediate_size", inner)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    routing = replace(
        missing,
        top_k=fields.integer("num_experts_per_tok", missing.top_k),
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", missing.scale),
        groups=fields.integer("n_group", missing.groups),
        top_groups=fields.integer("topk_group", missing.top_groups),
    )
    return ExpertsConfig(
        num_experts=number,
        inner=inner,
        routing=fitting(fields, routing, number),
        activation=config.activation,
        router_float32=True,
        correction_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        shared_inner=inner * fields.integer("n_shared_experts", 1),
    )
