"""Granite's mixtures (https://www.ibm.com/granite): experts in every layer, with or without an MLP for every
token; embeddings, attention, what layers add and logits are scaled."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting
from baton.models.families.granite import scaled
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.quantization.experts_format import FUSED
from baton_kernels.routing_rule import Routing


def read(fields: Fields) -> ModelConfig:
    """Read a Granite mixture's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(fields, qkv_bias=biased, o_bias=biased)
    number = fields.integer("num_local_experts", 8)
    routing = Routing(fields.integer("num_experts_per_tok", 2), renormalize=True)
    return replace(
        scaled(config, fields),
        experts=ExpertsConfig(
            num_experts=number,
            inner=config.intermediate_size,
            routing=fitting(fields, routing, number),
            names=FUSED,
            activation=config.activation,
            router="router.layer",
        ),
        expert_layers=(True,) * config.num_layers,
        names=((".mlp.", ".block_sparse_moe."),),
    )


def read_shared(fields: Fields) -> ModelConfig:
    """Read the config of a mixture with an MLP for every token. ModelError if it is not one that Baton
    serves."""
    config, shared = read(fields), fields.integer("shared_intermediate_size", 0, minimum=0)
    if config.experts is None or not shared:
        return config
    beside = (
        (".mlp.shared_mlp.gate_up_proj.", ".shared_mlp.input_linear."),
        (".mlp.shared_mlp.down_proj.", ".shared_mlp.output_linear."),
    )
    return replace(
        config,
        experts=replace(config.experts, shared="shared_mlp", shared_inner=shared),
        fused_gate_up=True,
        names=(*beside, *config.names),
    )
