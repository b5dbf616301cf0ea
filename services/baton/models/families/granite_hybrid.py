"""Granite 4 H (https://www.ibm.com/granite): Mamba-2 in most layers, attention in some; experts beside an
MLP for every token, or that MLP alone; the factors of Granite 3."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.expert_fields import fitting
from baton.models.families.granite import scaled
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.mamba_fields import layer_mixers, read_mamba
from baton.models.quantization.experts_format import FUSED
from baton_kernels.routing_rule import Routing

EXPERT_NAMES = (
    (".mlp.shared_mlp.gate_up_proj.", ".shared_mlp.input_linear."),
    (".mlp.shared_mlp.down_proj.", ".shared_mlp.output_linear."),
    (".mlp.", ".block_sparse_moe."),
)
MLP_NAMES = (
    (".mlp.gate_up_proj.", ".shared_mlp.input_linear."),
    (".mlp.down_proj.", ".shared_mlp.output_linear."),
)


def read(fields: Fields) -> ModelConfig:
    """Read Granite 4's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = scaled(llama_like(fields, qkv_bias=biased, o_bias=biased), fields)
    layers = config.num_layers
    name = "layer_types" if fields.has("layer_types") else "layers_block_type"
    fields.only("position_embedding_type", "rope", "nope")
    if fields.get("position_embedding_type") != "rope":
        config = replace(config, ropes=(None,) * layers)
    config = replace(
        config,
        mixers=layer_mixers(fields, name, layers),
        mamba=read_mamba(fields),
        fused_gate_up=True,
    )
    shared = fields.integer("shared_intermediate_size", 1024)
    number = fields.integer("num_local_experts", 8, minimum=0)
    if not number:
        return replace(config, intermediate_size=shared, names=MLP_NAMES)
    routing = Routing(fields.integer("num_experts_per_tok", 2), renormalize=True)
    experts = ExpertsConfig(
        num_experts=number,
        inner=config.intermediate_size,
        routing=fitting(fields, routing, number),
        names=FUSED,
        activation=config.activation,
        router="router.layer",
        shared="shared_mlp",
        shared_inner=shared,
    )
    return replace(config, experts=experts, expert_layers=(True,) * layers, names=EXPERT_NAMES)
