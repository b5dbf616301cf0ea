"""config.json of the families with latent attention: what a missing field means, and what is refused by
name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    MiniCPM3Config,
    Mistral4Config,
    PretrainedConfig,
    YoutuConfig,
)

from baton.models.config import ModelConfig, QueryScale, RopeConfig
from baton.models.mixer_config import LatentConfig
from baton.process.options import ModelError
from baton_kernels.kv_layout import TokenKV
from baton_kernels.routing_rule import Routing
from tests.support.published_configs import PUBLISHED

BASE: dict[str, object] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], Mapping[str, object]]] = {
    "DeepseekV2": (DeepseekV2Config, {"num_experts_per_tok": 6}),
    "DeepseekV3": (DeepseekV3Config, {}),
    "Mistral4": (Mistral4Config, {}),
    "MiniCPM3": (MiniCPM3Config, {}),
    "Glm4MoeLite": (Glm4MoeLiteConfig, {}),
    "Youtu": (YoutuConfig, {}),
}


def family(name: str, /, **changes: object) -> ModelConfig:
    needed = FAMILIES[name][1]
    return ModelConfig.from_dict({"architectures": [f"{name}ForCausalLM"], **BASE, **needed, **changes})


def published(name: str) -> ModelConfig:
    return ModelConfig.from_dict(PUBLISHED[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_fields_mean_what_they_mean_to_transformers(name: str) -> None:
    build, needed = FAMILIES[name]
    theirs = build(**BASE, **needed).to_dict()
    written = family(name, **{field: value for field, value in theirs.items() if field != "architectures"})
    # A tokenizer's ids, and no part of the formula.
    written = replace(written, eos_token_ids=(), bos_token_id=None)
    assert family(name) == written


def test_sizes_and_what_is_kept() -> None:
    lite, small = published("DeepSeek-V2-Lite"), published("MiniCPM3-4B")
    assert lite.latent == LatentConfig(None, 512, 128, 64, 128)
    assert small.latent == LatentConfig(768, 256, 64, 32, 64)
    assert published("DeepSeek-V3-bf16").latent == LatentConfig(1536, 512, 128, 64, 128)
    assert published("GLM-4.7-Flash").latent == LatentConfig(768, 512, 192, 64, 256)
    assert lite.kept(1) == lite.kept(8) == ((TokenKV(1, 1, 576),),) * 27
    assert small.kept(2) == ((TokenKV(1, 1, 288),),) * 62


def test_the_scale_of_scores_in_a_stretched_context() -> None:
    def scale(dim: int, factor: float, mscale: float) -> float:
        return float(dim**-0.5 * (0.1 * mscale * math.log(factor) + 1) ** 2)

    assert published("DeepSeek-V2-Lite").scale == pytest.approx(scale(192, 40, 0.707))
    assert published("DeepSeek-V3-bf16").scale == pytest.approx(scale(192, 40, 1.0))
    assert published("Mistral-Small-4-119B-2603").scale == pytest.approx(scale(128, 128, 1.0))
    assert published("Moonlight-16B-A3B-Instruct").scale == pytest.approx(192**-0.5)
    assert published("MiniCPM3-4B").scale == pytest.approx(96**-0.5)
    assert family("DeepseekV3", rope_scaling={"type": "yarn", "factor": 4.0, "mscale_all_dim": 0}).scale == (
        192**-0.5
    )


def test_rotation() -> None:
    assert published("Moonlight-16B-A3B-Instruct").rope == RopeConfig(theta=50_000.0, interleaved=True)
    assert not published("MiniCPM3-4B").rope.interleaved
    assert not family("DeepseekV3", rope_interleave=False).rope.interleaved
    mistral = published("Mistral-Small-4-119B-2603")
    assert (mistral.rope.kind, mistral.rope.partial, mistral.head_dim) == ("yarn", 1.0, 64)
    assert mistral.query_scale == QueryScale(0.1, 8192)
    assert mistral.max_model_len == 1_048_576


def test_routing() -> None:
    def routing(name: str) -> Routing:
        experts = published(name).experts
        assert experts is not None
        return experts.routing

    assert routing("DeepSeek-V2-Lite") == Routing(6)
    assert routing("DeepSeek-V2-Chat") == Routing(6, scale=16.0, groups=8, top_groups=3, group_best=1)
    biased = Routing(8, "sigmoid", renormalize=True, scale=2.5, groups=8, top_groups=4)
    assert routing("DeepSeek-V3-bf16") == biased
    assert routing("Mistral-Small-4-119B-2603") == Routing(4, renormalize=True)
    assert published("GLM-4.7-Flash").expert_layers == (False, *(True,) * 46)
    assert published("DeepSeek-V3-bf16").ignored == ("model.layers.61.",)


def test_factors_of_minicpm3() -> None:
    config = published("MiniCPM3-4B")
    assert (config.embedding_scale, config.logits_scale) == (12.0, 0.1)
    assert config.residual_scale == pytest.approx(1.4 / 62**0.5)
    plain = family("MiniCPM3", scale_depth=None, dim_model_base=None)
    assert (plain.residual_scale, plain.logits_scale) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DeepseekV3", {"num_key_value_heads": 8}, "num_key_value_heads is 8; allowed: num_attention_heads"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; allowed: an even number"),
        ("DeepseekV3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; allowed: a whole number of at least 1"),
        ("DeepseekV3", {"q_lora_rank": 0}, "q_lora_rank is 0; allowed: a whole number of at least 1"),
        ("DeepseekV3", {"scoring_func": "softmax"}, 'scoring_func is "softmax"; allowed: "sigmoid"'),
        ("DeepseekV3", {"topk_method": "greedy"}, 'topk_method is "greedy"; allowed: "noaux_tc"'),
        ("DeepseekV3", {"n_group": 7}, "n_group is 7; allowed: a divisor of the number of experts (256)"),
        ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; allowed: 1"),
        ("DeepseekV3", {"rope_interleave": 1}, "rope_interleave is 1; allowed: true or false"),
        (
            "DeepseekV2",
            {"topk_method": "noaux_tc"},
            'topk_method is "noaux_tc"; allowed: one of greedy, group_limited_greedy',
        ),
        ("DeepseekV2", {"topk_method": "group_limited_greedy"}, "n_group is missing; needed: a whole number"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob is true; allowed: false"),
        ("DeepseekV2", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("Glm4MoeLite", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2; allowed: 1"),
        ("Mistral4", {"rope_parameters": [1]}, "rope_parameters is [1]; allowed: an object"),
        ("Mistral4", {"rope_scaling": {"type": "cubic"}}, 'rope_parameters.type is "cubic"; allowed: one of'),
    ],
)
def test_refusals_name_the_field_and_what_is_allowed(
    name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as refusal:
        family(name, **changes)
    assert str(refusal.value).startswith("config.json: ")
    assert "\n" not in str(refusal.value)


def test_weights_may_be_quantized_beside_an_encoder() -> None:
    raw = {**PUBLISHED["Mistral-Small-4-119B-2603"]}
    text = raw["text_config"]
    assert isinstance(text, dict)
    raw["text_config"] = {**text, "quantization_config": {"quant_method": "fp8"}}
    found = ModelConfig.from_dict(raw).quantization
    assert found is not None and found.method == "fp8"
