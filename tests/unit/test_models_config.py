"""config.json as it is found in the wild, and refusals that name the field, the value and what is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.models.config import ModelConfig, RopeConfig
from baton.process.options import ModelError
from tests.support.published_configs import PUBLISHED

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def parse(generation: Mapping[str, object] | None = None, /, **changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **changes}, generation)


def without(*fields: str) -> dict[str, object]:
    return {name: value for name, value in BASE.items() if name not in fields}


def family(name: str, /, **changes: object) -> ModelConfig:
    return parse(architectures=[f"{name}ForCausalLM"], **changes)


def test_defaults() -> None:
    config = parse()
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (8, 2, 1e-6)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"
    assert ModelConfig.from_dict(without("num_key_value_heads")).num_kv_heads == 8
    assert parse(head_dim=32).head_dim == 32
    assert family("Qwen3").head_dim == 128


def test_biases() -> None:
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = family("Qwen2", attention_bias=False)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    qwen3 = family("Qwen3", attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)
    mistral = family("Mistral", attention_bias=True)
    assert (mistral.qkv_bias, mistral.o_bias, mistral.mlp_bias) == (False, False, False)


def test_rope_in_both_spellings() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = parse(
        rope_theta=5e5, rope_scaling={"type": "llama3", "original_max_position_embeddings": 512, **llama3}
    )
    new = parse(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "original_max_position_embeddings": 512,
            **llama3,
        }
    )
    assert old == new
    assert new.rope == RopeConfig("llama3", 5e5, 8.0, 512, 1.0, 4.0)
    assert parse(rope_theta=77, rope_scaling=None).rope.theta == 77
    assert parse(rope_theta=1, rope_parameters={"rope_theta": 2, "rope_type": "default"}).rope.theta == 2


def test_context_length() -> None:
    assert parse().max_model_len == 2048
    linear = parse(rope_scaling={"rope_type": "linear", "factor": 4})
    assert linear.max_model_len == 2048
    dynamic = parse(rope_scaling={"rope_type": "dynamic", "factor": 4})
    assert dynamic.max_model_len == 8192
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}
    assert parse(rope_scaling=yarn).max_model_len == 8192
    assert parse(rope_scaling=yarn, max_position_embeddings=8192).max_model_len == 8192


def test_windows() -> None:
    assert parse(sliding_window=9).windows == (None, None, None)
    assert family("Mistral", sliding_window=9).windows == (9, 9, 9)
    assert family("Mistral", sliding_window=None).windows == (None, None, None)
    assert family("Mistral").windows == (4096, 4096, 4096)
    assert family("Qwen2", sliding_window=9, max_window_layers=1).windows == (None, None, None)
    used = {"use_sliding_window": True, "sliding_window": 9}
    assert family("Qwen2", **used, max_window_layers=1).windows == (None, 9, 9)
    assert family("Qwen3", **used, max_window_layers=0).windows == (9, 9, 9)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert family("Qwen3", **used, layer_types=kinds).windows == (9, None, None)


def test_code_that_comes_with_a_model_of_batons_own_is_left_alone() -> None:
    assert parse(auto_map={"AutoModelForCausalLM": "modeling.Model"}) == parse()


def test_end_tokens() -> None:
    assert parse().eos_token_ids == ()
    assert parse(eos_token_id=2).eos_token_ids == (2,)
    assert parse(eos_token_id=0).eos_token_ids == (0,)
    assert parse({"eos_token_id": [9, 7, 9]}, eos_token_id=2).eos_token_ids == (7, 9)
    assert parse({"temperature": 0.6}, eos_token_id=2).eos_token_ids == (2,)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype(field: str) -> None:
    assert parse(**{field: "bfloat16"}).dtype == "bfloat16"


REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"architectures": ["GPT2LMHeadModel"]},
        'architectures is ["GPT2LMHeadModel"]; allowed: one of LlamaForC',
    ),
    ({"architectures": []}, "architectures is []; allowed: one of"),
    ({"architectures": None}, "architectures is missing; needed: one of LlamaForCausalLM, Mistral"),
    ({"hidden_size": None}, "hidden_size is missing; needed: a whole number of at least 1"),
    ({"vocab_size": "many"}, 'vocab_size is "many"; allowed: a whole number of at least 1'),
    ({"architectures": [["x"]]}, 'architectures is [["x"]]; allowed: one of'),
    ({"architectures": [{}], "auto_map": {}}, "auto_map is {}; allowed: nothing"),
    (
        {"num_hidden_layers": 2**64},
        "num_hidden_layers is 18446744073709551616; allowed: a whole number of at most",
    ),
    ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001; allowed: a whole number of at most 10000"),
    ({"vocab_size": 2**31}, "vocab_size is 2147483648; allowed: a whole number of at most 2147483647"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity; allowed: a number of at most"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; allowed: a number above 0"),
    ({"rms_norm_eps": 10**400}, "; allowed: a number of at most 3e+38"),
    ({"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308; allowed: a number of at most"),
    ({"partial_rotary_factor": 1e30}, "partial_rotary_factor is 1e+30; allowed: at most 1"),
    (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": float("inf"),
                "original_max_position_embeddings": 8,
            }
        },
        "rope_scaling.factor is Infinity; allowed: a number of at most",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e30, "original_max_position_embeddings": 8}},
        "max_position_embeddings is 2048; allowed: a length that, times the factor of the rotation, is",
    ),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 1000}},
        "max_position_embeddings is 2048; allowed: a length that, times the factor of the rotation, is",
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 10**400], "factor": 2}},
        "; allowed: 4 numbers above 0",
    ),
    ({"eos_token_id": 2**31}, "eos_token_id is 2147483648; allowed: a token id"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; allowed: a whole number of at least 1"),
    ({"num_hidden_layers": True}, "num_hidden_layers is true; allowed: a whole number of at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of num_attention_heads (8)"),
    ({"num_attention_heads": 10}, "hidden_size is 64; allowed: a multiple of num_attention_heads (10)"),
    ({"head_dim": 7}, "head_dim is 7; allowed: an even number"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; allowed: one of silu, swish, gelu_pytorch_tanh'),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0; allowed: a number above 0"),
    ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes"; allowed: true or false'),
    ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method is missing; needed: a string"),
    (
        {"architectures": ["OddModel"], "auto_map": {"AutoModel": "m.M"}},
        "Baton runs no code that comes with a model",
    ),
    ({"torch_dtype": "float64"}, 'torch_dtype is "float64"; allowed: one of float32, bfloat16, float16'),
    ({"eos_token_id": "</s>"}, 'eos_token_id is "</s>"; allowed: a token id or a list of them'),
    ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]; allowed"),
    ({"rope_theta": -1}, "rope_theta is -1; allowed: a number above 0"),
    ({"rope_scaling": "linear"}, 'rope_scaling is "linear"; allowed: an object'),
    (
        {"rope_scaling": {"rope_type": "ntk"}},
        'rope_scaling.rope_type is "ntk"; allowed: one of default, linear, dynamic, llama3, yarn, longrope',
    ),
    (
        {"rope_scaling": {"type": "su", "short_factor": [1.0, 2.0]}},
        "rope_scaling.short_factor is [1.0, 2.0]; allowed: 4 numbers above 0",
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 0], "factor": 2}},
        "rope_scaling.short_factor is [1, 1, 1, 0]; allowed: 4 numbers above 0",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing; needed: a number above 0"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
        "rope_parameters.factor is 0.5; allowed: a number of at least 1",
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 5,
                "high_freq_factor": 4,
            }
        },
        "rope_scaling.high_freq_factor is 4; allowed: at least low_freq_factor (5)",
    ),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; allowed: at most 1"),
    ({"partial_rotary_factor": 0.4}, "partial_rotary_factor is 0.4; allowed: at most 1, and an even number"),
    (
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]},
        "allowed: 3 times full_attention or sliding_attention",
    ),
    (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3},
        "allowed: full_attention only, unless use_sliding_window is true",
    ),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0; allowed"),
    (
        {"architectures": ["MistralForCausalLM"], "attention_bias": "no"},
        'attention_bias is "no"; allowed: true or false',
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refusals(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
    with pytest.raises(ModelError) as refusal:
        ModelConfig.from_dir(tmp_path)
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path / 'config.json'}: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: (cannot be read as JSON|holds no JSON object)"):
        ModelConfig.from_dir(tmp_path)


def test_a_value_that_nobody_expected_is_refused_with_its_field() -> None:
    config = {**PUBLISHED["granite-4.0-h-1b"], "layer_types": [["mamba"]] * 40}
    with pytest.raises(
        ModelError, match=r"^here: layer_types, or a field before it, has a value that cannot be"
    ):
        ModelConfig.from_dict(config, where="here")


def test_files_nested_too_deep(tmp_path: Path) -> None:
    deep = {depth: '{"a": ' + "[" * depth + "]" * depth + "}" for depth in (65, 100_000)}
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    for text in deep.values():
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ModelError, match=r"generation_config\.json: .* as JSON \(nested deeper than 64"):
            ModelConfig.from_dir(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for text in deep.values():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"/config\.json: .* as JSON \(nested deeper than 64"):
            ModelConfig.from_dir(tmp_path)


def test_a_file_too_large(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(1 << 33)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON \(over \d+ bytes\)"):
        ModelConfig.from_dir(tmp_path)


def test_long_values_are_shown_in_part() -> None:
    with pytest.raises(ModelError) as error:
        parse(hidden_act="x" * 100_000)
    assert 200 < len(str(error.value)) < 400


def test_missing_directory_and_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_router_side_modules_import_no_torch() -> None:
    code = (
        "import sys, baton.hub, baton.process.options, baton.models.config; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
