"""The configs of the families without experts: as published, as transformers writes them, and refused."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import pytest
from transformers import AutoConfig

from baton.models.config import ModelConfig, QueryScale, RopeConfig
from baton.models.registry import FAMILIES, UNSERVED
from baton.process.options import ModelError
from tests.support.published_configs import PUBLISHED
from tests.unit.test_models_config import BASE

FULL, SLIDING = "full_attention", "sliding_attention"


def parse(family: str, /, **changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, "architectures": [f"{family}ForCausalLM"], **changes})


UNUSUAL: list[tuple[str, Mapping[str, object]]] = [
    ("gemma-3-1b-it", {"rope_local_base_freq": 777, "rope_theta": 5e5, "sliding_window_pattern": 4}),
    ("gemma-3-1b-it", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ("gemma-2-9b-it", {"rope_scaling": {"type": "linear", "factor": 3.0}, "query_pre_attn_scalar": 144}),
    ("Olmo-3-7B-Instruct", {"rope_theta": 777.0}),
    ("Olmo-3-7B-Instruct", {"layer_types": None, "rope_scaling": None}),
    ("SmolLM3-3B", {"no_rope_layers": None, "no_rope_layer_interval": 3}),
    ("SmolLM3-3B", {"use_sliding_window": True, "sliding_window": 512}),
    ("c4ai-command-r7b-12-2024", {"sliding_window_pattern": 2}),
    ("GLM-4-9B-0414", {"partial_rotary_factor": 0.25}),
    ("Phi-4-mini-instruct", {"original_max_position_embeddings": 8192}),
    ("phi-4", {"num_key_value_heads": None}),
    ("Ministral-8B-Instruct-2410", {"layer_types": None}),
    ("starcoder2-15b", {"sliding_window": None}),
    ("Seed-OSS-36B-Instruct", {"head_dim": None}),
]


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in PUBLISHED), *UNUSUAL])
def test_configs_mean_what_transformers_makes_of_them(name: str, changes: Mapping[str, object]) -> None:
    raw = {**PUBLISHED[name], **changes}
    fields = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
    standard = AutoConfig.for_model(str(raw["model_type"]), **deepcopy(fields)).to_dict()
    assert "rope_scaling" not in standard
    standard["architectures"] = raw["architectures"]
    assert without_ends(ModelConfig.from_dict(raw)) == without_ends(ModelConfig.from_dict(standard))


def without_ends(config: ModelConfig) -> ModelConfig:
    """Without the ids that a config leaves to generation_config.json, for which transformers has numbers of
    its own."""
    return replace(config, eos_token_ids=(), bos_token_id=None)


def published(name: str) -> ModelConfig:
    return ModelConfig.from_dict(PUBLISHED[name])


def test_gemma() -> None:
    gemma2 = published("gemma-2-9b-it")
    assert gemma2.windows == (4096, None) * 21
    assert (gemma2.embedding_scale, gemma2.scale) == (3584**0.5, 1 / 16)
    assert (gemma2.attention_softcap, gemma2.logits_softcap) == (50.0, 30.0)
    assert gemma2.tie_word_embeddings
    small, large = published("gemma-3-1b-it"), published("gemma-3-4b-it")
    assert small.windows == (*(512,) * 5, None) * 4 + (512, 512)
    assert small.ropes[4:6] == (RopeConfig(theta=1e4), RopeConfig(theta=1e6))
    assert large.ropes[4:6] == (RopeConfig(theta=1e4), RopeConfig("linear", 1e6, 8.0))
    assert (large.num_heads, large.num_kv_heads, large.head_dim, large.vocab_size) == (8, 4, 256, 262_208)
    assert large.eos_token_ids == (1, 106)
    assert large.dtype == "bfloat16"
    pattern = parse("Gemma3", sliding_window_pattern=2, sliding_window=7, head_dim=8)
    assert pattern.windows == (7, None, 7)
    assert pattern.ropes[0] == RopeConfig(theta=1e4)


def test_end_tokens_beside_an_encoder() -> None:
    """The ids are those of generation_config.json, then the whole model's, then the text model's."""
    text = {"eos_token_id": 1, "bos_token_id": 3}
    config = {**PUBLISHED["Mistral-Small-3.1-24B-Instruct-2503"]}
    config["text_config"] = {**dict_of(config["text_config"]), **text}
    assert ModelConfig.from_dict(config).eos_token_ids == (1,)
    assert ModelConfig.from_dict(config).bos_token_id == 3
    config |= {"eos_token_id": 5, "bos_token_id": 6}
    assert ModelConfig.from_dict(config).eos_token_ids == (5,)
    assert ModelConfig.from_dict(config).bos_token_id == 6
    assert ModelConfig.from_dict(config, {"eos_token_id": 7}).eos_token_ids == (7,)


def dict_of(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def test_tied_embeddings_beside_an_encoder() -> None:
    """The whole model's field counts, as its head is the whole model's."""
    raw = {**PUBLISHED["gemma-3-4b-it"]}
    assert ModelConfig.from_dict(raw).tie_word_embeddings
    assert not ModelConfig.from_dict({**raw, "tie_word_embeddings": False}).tie_word_embeddings


def test_rope_of_each_family() -> None:
    assert published("glm-4-9b-chat-hf").rope == RopeConfig(partial=0.5, interleaved=True)
    assert published("phi-4").rope == RopeConfig(theta=250_000)
    mini = published("Phi-4-mini-instruct").rope
    assert (mini.kind, mini.partial, mini.factor, mini.original_max_positions) == ("longrope", 0.75, 32, 4096)
    factors = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    assert parse("Phi3", rope_scaling=factors, max_position_embeddings=8192).rope.factor == 2
    assert parse("Ernie4_5").rope == RopeConfig(theta=500_000, interleaved=True)
    assert parse("SmolLM3").rope.theta == 2_000_000
    assert published("Hunyuan-7B-Instruct").rope == RopeConfig(theta=1e4 * 1000 ** (128 / 126))
    dynamic = parse("HunYuanDenseV1", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic.rope.kind == "dynamic"
    assert published("internlm3-8b-instruct").max_model_len == 6 * 32768


def test_layers_without_rotation() -> None:
    assert [rope is not None for rope in published("SmolLM3-3B").ropes] == [True, True, True, False] * 9
    assert [rope is not None for rope in parse("SmolLM3", no_rope_layer_interval=2).ropes] == [
        True,
        False,
        True,
    ]
    cohere = published("c4ai-command-r7b-12-2024")
    assert [rope is not None for rope in cohere.ropes] == [True, True, True, False] * 8
    assert cohere.windows == (4096, 4096, 4096, None) * 8


def test_windows_of_each_family() -> None:
    assert parse("Phi3", sliding_window=9).windows == (9, 9, 9)
    assert parse("Phi3").windows == (None, None, None)
    assert parse("Starcoder2").windows == (None, None, None)
    assert parse("Ministral3", rope_parameters={"rope_type": "default"}).windows == (None, None, None)
    assert parse("Ministral").windows == (4096, 4096, 4096)
    assert parse("Ministral", sliding_window=None).windows == (None, None, None)
    kinds = [SLIDING, FULL, SLIDING]
    for family in ("Ministral", "Mistral", "Gemma2", "Gemma3", "Cohere2", "Olmo3"):
        assert parse(family, layer_types=kinds, sliding_window=9).windows == (9, None, 9)
    windowed = {"use_sliding_window": True, "sliding_window": 9}
    assert parse("SmolLM3", **windowed, no_rope_layers=[1, 0, 0]).windows == (None, 9, 9)
    assert parse("SmolLM3", **windowed, layer_types=kinds).windows == (9, None, 9)
    assert parse("SmolLM3", sliding_window=9, no_rope_layers=[1, 0, 0]).windows == (None, None, None)


def test_biases_of_each_family() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases(parse("Glm")) == biases(parse("SeedOss")) == (True, False, False)
    assert biases(parse("SeedOss", attention_bias=False, attention_out_bias=True)) == (False, True, False)
    assert biases(parse("Ernie4_5", use_bias=True)) == biases(parse("Starcoder2")) == (True, True, True)
    assert biases(parse("InternLM3", qkv_bias=True, bias=True)) == (True, True, True)
    assert biases(parse("HunYuanDenseV1", attention_bias=True)) == (True, True, False)
    assert biases(parse("Cohere2", attention_bias=True)) == (True, True, False)


def test_factors() -> None:
    granite = published("granite-3.3-8b-instruct")
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.scale, granite.logits_scale) == (1 / 128, 1 / 16)
    assert parse("Granite").scale == 1.0
    assert published("c4ai-command-r7b-12-2024").logits_scale == 0.25
    assert parse("Cohere2").logits_scale == 0.0625
    ministral = published("Ministral-3-8B-Instruct-2512")
    assert ministral.query_scale == QueryScale(0.1, 16384)
    assert published("Mistral-Small-3.1-24B-Instruct-2503").query_scale is None
    none = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0, "llama_4_scaling_beta": 0}
    unscaled = parse("Ministral3", rope_parameters=none)
    assert unscaled.query_scale is None
    assert (unscaled.rope.mscale, unscaled.rope.mscale_all_dim) == (1.0, None)


REFUSED: list[tuple[str, Mapping[str, object], str]] = [
    ("Gemma2", {"hidden_activation": None}, "hidden_activation is missing; needed: a string"),
    ("Gemma2", {"hidden_activation": "gelu"}, 'hidden_activation is "gelu"; allowed: one of silu'),
    ("Gemma2", {"sliding_window_pattern": 6}, "sliding_window_pattern is 6; allowed: 2"),
    ("Gemma2", {"sliding_window": None}, "sliding_window is missing; needed: a whole number of at least 1"),
    ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true; allowed: false"),
    ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; allowed: null"),
    ("Gemma3", {"layer_types": [FULL]}, "allowed: 3 times full_attention or sliding_attention"),
    ("Gemma3", {"layer_types": [FULL, FULL, {}]}, "allowed: 3 times full_attention or sliding_attention"),
    (
        "Gemma3",
        {"rope_parameters": {"rope_type": "default"}},
        "allowed: an object for each kind of layer, full_attention and sliding_attention",
    ),
    ("Gemma3", {"rope_parameters": {FULL: {"rope_type": "proportional"}}}, "full_attention.rope_type is"),
    ("Olmo3", {"sliding_window_pattern": 2}, "sliding_window_pattern is 2; allowed: 4"),
    (
        "Phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        'rope_scaling.type is "linear"; allowed: default or',
    ),
    ("SmolLM3", {"no_rope_layers": [1, 1]}, "no_rope_layers is [1, 1]; allowed: 3 times 0 or 1"),
    ("SmolLM3", {"no_rope_layers": [1, 1, 3]}, "no_rope_layers is [1, 1, 3]; allowed: 3 times 0 or 1"),
    ("SmolLM3", {"layer_types": [FULL, FULL, SLIDING]}, "full_attention only, unless use_sliding_window"),
    ("Cohere2", {"use_qk_norm": True}, "use_qk_norm is true; allowed: false"),
    ("Cohere2", {"rotary_pct": 0.5}, "rotary_pct is 0.5; allowed: 1.0"),
    ("Cohere2", {"logit_scale": 0}, "logit_scale is 0; allowed: a number above 0"),
    ("InternLM3", {"qkv_bias": True}, "qkv_bias is true; allowed: the same as bias"),
    ("Starcoder2", {"norm_type": "rms"}, 'norm_type is "rms"; allowed: "layer_norm"'),
    ("Ministral3", {}, "rope_parameters is missing; needed: an object"),
    (
        "Ministral3",
        {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "rope_parameters.original_max_position_embeddings is missing",
    ),
    (
        "Ministral3",
        {"rope_parameters": {"llama_4_scaling_beta": False}},
        "llama_4_scaling_beta is false; allowed: a number above 0",
    ),
    ("HunYuanDenseV1", {"use_qk_norm": False}, "use_qk_norm is false; allowed: true"),
    ("HunYuanDenseV1", {"num_experts": 16}, "num_experts is 16; allowed: 1"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_refusals(family: str, changes: Mapping[str, object], message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        parse(family, **changes)
    assert message in str(refusal.value)


def test_a_text_model_of_another_kind_is_refused() -> None:
    raw = {**PUBLISHED["Mistral-Small-3.1-24B-Instruct-2503"]}
    raw["text_config"] = {**dict_of(raw["text_config"]), "model_type": "mistral5"}
    with pytest.raises(ModelError, match=r'text_config.model_type is "mistral5"; allowed: one of mistral, '):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("architecture", UNSERVED)
def test_known_architectures_are_refused_with_the_reason(architecture: str) -> None:
    assert architecture not in FAMILIES
    with pytest.raises(ModelError) as refusal:
        ModelConfig.from_dict({**BASE, "architectures": [architecture]})
    assert str(refusal.value) == f'config.json: architectures is ["{architecture}"]: {UNSERVED[architecture]}'
