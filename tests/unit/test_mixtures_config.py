"""config.json of the families with experts: what a missing field means, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import (
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    Llama4TextConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from baton.models.config import ExpertsConfig, ModelConfig, QueryScale, RopeConfig
from baton.process.options import ModelError
from baton_kernels.routing_rule import Routing
from baton_kernels.window import ChunkedWindow

BASE: dict[str, object] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "Mixtral": MixtralConfig,
    "Qwen2Moe": Qwen2MoeConfig,
    "Qwen3Moe": Qwen3MoeConfig,
    "Glm4Moe": Glm4MoeConfig,
    "MiniMaxM2": MiniMaxM2Config,
    "HYV3": HYV3Config,
    "HunYuanMoEV1": HunYuanMoEV1Config,
    "GptOss": GptOssConfig,
    "Llama4": Llama4TextConfig,
    "Phimoe": PhimoeConfig,
    "GraniteMoe": GraniteMoeConfig,
    "GraniteMoeShared": GraniteMoeSharedConfig,
    "Olmoe": OlmoeConfig,
    "Ernie4_5_Moe": Ernie4_5_MoeConfig,
}


def family(name: str, /, **changes: object) -> ModelConfig:
    return ModelConfig.from_dict({"architectures": [f"{name}ForCausalLM"], **BASE, **changes})


def experts_of(name: str, /, **changes: object) -> ExpertsConfig:
    experts = family(name, **changes).experts
    assert experts is not None
    return experts


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        *((name, {"num_experts": 4} if name == "HunYuanMoEV1" else {}) for name in FAMILIES),
        ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("Qwen3Moe", {"use_sliding_window": True}),
        ("Mixtral", {"sliding_window": 8}),
        ("GptOss", {"sliding_window": 8}),
        ("Llama4", {"no_rope_layer_interval": 3, "attention_chunk_size": 8}),
    ],
)
def test_missing_fields_mean_what_they_mean_to_transformers(name: str, needed: dict[str, object]) -> None:
    theirs = FAMILIES[name](**BASE, **needed).to_dict()
    written = family(name, **{field: value for field, value in theirs.items() if field != "architectures"})
    # A tokenizer's ids, and no part of the formula.
    written = replace(written, eos_token_ids=(), bos_token_id=None)
    assert family(name, **needed) == written


@pytest.mark.parametrize(
    ("name", "field", "value", "layers"),
    [
        ("Qwen2Moe", "decoder_sparse_step", 2, (False, True, False, True)),
        ("Qwen3Moe", "mlp_only_layers", [0, 2], (False, True, False, True)),
        ("Glm4Moe", "first_k_dense_replace", 3, (False, False, False, True)),
        ("HYV3", "first_k_dense_replace", 2, (False, False, True, True)),
        ("HYV3", "mlp_layer_types", ["sparse", "dense"] * 2, (True, False, True, False)),
        ("Llama4", "interleave_moe_layer_step", 2, (False, True, False, True)),
        ("Llama4", "moe_layers", [3, 0], (True, False, False, True)),
        ("Ernie4_5_Moe", "moe_layer_interval", 2, (False, True, False, True)),
        ("Ernie4_5_Moe", "moe_layer_end_index", 2, (False, True, True, False)),
        ("Ernie4_5_Moe", "moe_layer_start_index", 0, (True, True, True, True)),
        ("Mixtral", "num_local_experts", 3, (True, True, True, True)),
    ],
)
def test_layers_that_have_experts(name: str, field: str, value: object, layers: tuple[bool, ...]) -> None:
    config = family(name, **{field: value})
    assert config.expert_layers == layers
    assert [config.has_experts(layer) for layer in range(4)] == [*layers]


def test_routing() -> None:
    grouped = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_experts_per_tok": 6}
    assert experts_of("Glm4Moe", **grouped).routing == Routing(
        6, "sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2
    )
    assert experts_of("Phimoe").routing == Routing(2, "sparsemixer", jitter=0.01)
    assert experts_of("Llama4").routing == Routing(1, "sigmoid", weighs_input=True)
    assert experts_of("Ernie4_5_Moe", moe_norm_min=0.1).routing == Routing(6, renormalize=True, least_sum=0.1)
    assert not experts_of("Qwen3Moe").routing.renormalize


def test_fields_by_their_other_names() -> None:
    for name, other in (("Qwen3Moe", "num_local_experts"), ("Glm4Moe", "num_local_experts")):
        assert experts_of(name, **{other: 16}).num_experts == 16
    assert experts_of("Ernie4_5_Moe", num_experts=16, num_experts_per_tok=3).routing.top_k == 3
    assert experts_of("HunYuanMoEV1", num_experts=9, num_experts_per_tok=3).routing.top_k == 3
    assert len(family("Glm4Moe", num_mtp_layers=2).ignored) == 2


def test_llama_4_as_published() -> None:
    config = family("Llama4", attn_temperature_tuning=4, no_rope_layers=[], attention_chunk_size=512)
    assert config.windows == (ChunkedWindow(512),) * 3 + (None,)
    rope = RopeConfig(theta=500_000.0, interleaved=True)
    assert config.ropes == (rope, rope, rope, None)
    assert config.query_scale == QueryScale(0.1, 8192, shift=1, unrotated_only=True)
    assert [config.head_norm_of(layer) for layer in range(4)] == ["plain", "plain", "plain", None]
    assert family("Llama4", attn_temperature_tuning=False).query_scale is None


def test_minimax_m2_as_published() -> None:
    published = {
        "rotary_dim": 64,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "attn_type_list": [1, 1, 1, 1],
        "num_mtp_modules": 3,
    }
    config = family("MiniMaxM2", **published)
    assert config.rope == RopeConfig(theta=5e6, partial=0.5)
    assert config.ignored == ("model.layers.4.", "model.layers.5.", "model.layers.6.")
    assert config.head_norm == "whole"


def test_hunyuan_as_published() -> None:
    published = {
        "num_experts": 64,
        "moe_topk": [8] * 4,
        "moe_intermediate_size": [128] * 4,
        "num_shared_expert": [1] * 4,
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "head_dim": 128,
    }
    config = family("HunYuanMoEV1", **published)
    assert config.rope == RopeConfig(theta=10_000 * 1000 ** (128 / 126))
    assert config.experts is not None and config.experts.routing == Routing(8, renormalize=True)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mixtral", {"hidden_act": "relu"}, 'hidden_act is "relu"; allowed: one of silu'),
        (
            "Mixtral",
            {"num_local_experts": 0},
            "num_local_experts is 0; allowed: a whole number of at least 1",
        ),
        ("Mixtral", {"sliding_window": 0}, "sliding_window is 0; allowed: a whole number"),
        (
            "Mixtral",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9; allowed: 1 to 8, the experts that are chosen from",
        ),
        ("Mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; allowed: a whole number"),
        ("Ernie4_5_Moe", {"moe_k": 65}, "moe_k is 65; allowed: 1 to 64"),
        ("Glm4Moe", {"n_group": 5}, "n_group is 5; allowed: a divisor of the number of experts (128)"),
        ("Glm4Moe", {"n_group": 4, "topk_group": 5}, "topk_group is 5; allowed: 1 to n_group (4)"),
        (
            "Glm4Moe",
            {"n_group": 32, "topk_group": 1, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5; allowed: 1 to 4, the experts that are chosen from",
        ),
        ("Glm4Moe", {"scoring_func": "softmax"}, 'scoring_func is "softmax"; allowed: "sigmoid"'),
        (
            "Qwen2Moe",
            {"mlp_only_layers": [4]},
            "mlp_only_layers is [4]; allowed: a list of layers, each 0 to 3",
        ),
        ("Qwen3Moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1; allowed: a list of layers"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; allowed: a whole number"),
        ("Qwen2Moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; allowed: true or false"),
        (
            "Qwen2Moe",
            {"layer_types": ["full_attention", "linear_attention"] * 2},
            '"linear_attention"]; allowed: 4 times full_attention or sliding_attention',
        ),
        (
            "Qwen2Moe",
            {"layer_types": ["sliding_attention"] * 4},
            "allowed: full_attention only, unless use_sliding_window is true",
        ),
        ("HYV3", {"mlp_layer_types": ["sparse"] * 3}, '"sparse"]; allowed: 4 times dense or sparse'),
        ("HYV3", {"mlp_layer_types": ["moe"] * 4}, '"moe"]; allowed: 4 times dense or sparse'),
        ("HYV3", {"route_norm": False}, "route_norm is false; allowed: true"),
        ("MiniMaxM2", {"use_qk_norm": False}, "use_qk_norm is false; allowed: true"),
        ("MiniMaxM2", {"qk_norm_type": "per_head"}, 'qk_norm_type is "per_head"; allowed: "per_layer"'),
        ("MiniMaxM2", {"scoring_func": "softmax"}, 'scoring_func is "softmax"; allowed: "sigmoid"'),
        ("MiniMaxM2", {"use_routing_bias": False}, "use_routing_bias is false; allowed: true"),
        ("MiniMaxM2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8; allowed: 0"),
        ("MiniMaxM2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list is [1, 0, 1, 1]; allowed: 4 times 1"),
        ("MiniMaxM2", {"rotary_dim": 256}, "rotary_dim is 256; allowed: an even number up to head_dim (128)"),
        ("HunYuanMoEV1", {"moe_topk": [1, 2, 1, 1]}, "moe_topk is [1, 2, 1, 1]; allowed: a whole number"),
        ("HunYuanMoEV1", {"moe_topk": 2}, "moe_topk is 2; allowed: 1 to 1, the experts that are chosen from"),
        ("HunYuanMoEV1", {"num_experts": [4, 4]}, "num_experts is [4, 4]; allowed: a whole number"),
        (
            "HunYuanMoEV1",
            {"moe_intermediate_size": 64},
            "moe_intermediate_size is 64; allowed: intermediate_size (128)",
        ),
        ("HunYuanMoEV1", {"num_shared_expert": 2}, "num_shared_expert is 2; allowed: 1"),
        ("HunYuanMoEV1", {"use_cla": True}, "use_cla is true; allowed: false"),
        ("HunYuanMoEV1", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1; allowed: 0"),
        (
            "GptOss",
            {"quantization_config": {"quant_method": "bitnet"}},
            'quantization_config.quant_method is "bitnet"; allowed: one of fp8, compressed-tensors',
        ),
        ("GptOss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; allowed: 1.702"),
        ("GptOss", {"swiglu_limit": 0}, "swiglu_limit is 0; allowed: a number above 0"),
        (
            "GptOss",
            {"layer_types": ["chunked_attention"] * 4},
            '"chunked_attention"]; allowed: 4 times full_attention or sliding_attention',
        ),
        ("GptOss", {"layer_types": ["full_attention"] * 3}, '"full_attention"]; allowed: 4 times'),
        ("GptOss", {"sliding_window": None}, "layer_types is missing; needed: full_attention only"),
        ("Llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]; allowed: 4 times 0 or 1"),
        (
            "Llama4",
            {"no_rope_layers": [1, 0, 2, 1]},
            "no_rope_layers is [1, 0, 2, 1]; allowed: 4 times 0 or 1",
        ),
        ("Llama4", {"moe_layers": [4]}, "moe_layers is [4]; allowed: a list of layers, each 0 to 3"),
        ("Llama4", {"attention_chunk_size": None}, "attention_chunk_size is missing; needed: a whole number"),
        (
            "Llama4",
            {"layer_types": ["sliding_attention"] * 4},
            '"sliding_attention"]; allowed: 4 times full_attention or chunked_attention',
        ),
        ("Llama4", {"attn_temperature_tuning": 3}, "attn_temperature_tuning is 3; allowed: true or false"),
        ("Phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; allowed: 2"),
        (
            "Phimoe",
            {"lm_head_bias": True, "tie_word_embeddings": True},
            "lm_head_bias is true; allowed: false with tie_word_embeddings",
        ),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; allowed: null"),
        ("Olmoe", {"head_dim": 8}, "head_dim is 8; allowed: hidden_size / num_attention_heads (16)"),
        ("GraniteMoe", {"logits_scaling": 0}, "logits_scaling is 0; allowed: a number above 0"),
        (
            "Ernie4_5_Moe",
            {"use_bias": True},
            "use_bias is true; allowed: false with tie_word_embeddings",
        ),
        ("Ernie4_5_Moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0; allowed: a whole number"),
    ],
)
def test_refusals_name_the_field_and_what_is_allowed(
    name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as refusal:
        family(name, **changes)
    assert str(refusal.value).startswith("config.json: ")
    assert "\n" not in str(refusal.value)
