"""config.json of the families with linear attention: as published, what a missing field means, and what is
refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace

import pytest
from transformers import (
    AutoConfig,
    KimiLinearConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from baton.models.config import ModelConfig
from baton.models.lightning_attention import decay_rates
from baton.process.options import ModelError
from baton_kernels.kv_layout import StateKV, TokenKV
from tests.support.published_states import PUBLISHED_STATES

BASE: dict[str, object] = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 16}
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "Qwen3Next": Qwen3NextConfig,
    "KimiLinear": KimiLinearConfig,
    "Qwen3_5": Qwen3_5TextConfig,
    "Qwen3_5Moe": Qwen3_5MoeTextConfig,
}
LAYERS: dict[str, dict[str, object]] = {
    "Qwen3Next": {"num_hidden_layers": 8},
    "KimiLinear": {"num_key_value_heads": 16},
    "Qwen3_5": {},
    "Qwen3_5Moe": {},
}


def family(name: str, /, **changes: object) -> ModelConfig:
    return ModelConfig.from_dict({"architectures": [f"{name}ForCausalLM"], **BASE, **changes})


def without_ends(config: ModelConfig) -> ModelConfig:
    """Without the ids that transformers has numbers of its own for."""
    return replace(config, eos_token_ids=(), bos_token_id=None)


def published(name: str) -> ModelConfig:
    return ModelConfig.from_dict(PUBLISHED_STATES[name])


@pytest.mark.parametrize("name", [name for name in PUBLISHED_STATES if "Ring" not in name])
def test_configs_mean_what_transformers_makes_of_them(name: str) -> None:
    raw = PUBLISHED_STATES[name]
    fields = {key: value for key, value in raw.items() if key != "model_type"}
    standard = AutoConfig.for_model(str(raw["model_type"]), **deepcopy(fields)).to_dict()
    standard["architectures"] = raw["architectures"]
    assert without_ends(ModelConfig.from_dict(standard)) == without_ends(published(name))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        *LAYERS.items(),
        ("Qwen3Next", {"num_hidden_layers": 6, "full_attention_interval": 3}),
        ("Qwen3_5", {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}),
    ],
)
def test_missing_fields_mean_what_they_mean_to_transformers(name: str, needed: Mapping[str, object]) -> None:
    theirs = FAMILIES[name](**BASE, **needed).to_dict()
    written = family(name, **{field: value for field, value in theirs.items() if field != "architectures"})
    assert without_ends(family(name, **needed)) == without_ends(written)


def test_layers_as_published() -> None:
    config = published("Qwen3-Next-80B-A3B-Instruct")
    assert config.mixers == (*(("delta",),) * 3, ("attention",)) * 12
    assert all(config.expert_layers)
    assert (config.rope.theta, config.rope.partial, config.norm_offset) == (1e7, 0.25, 1.0)
    assert config.experts is not None and config.experts.routing.renormalize
    kimi = published("Kimi-Linear-48B-A3B-Instruct")
    assert kimi.mixers == (*(*(("delta",),) * 3, ("latent",)) * 6, ("delta",), ("delta",), ("latent",))
    assert not any(kimi.ropes) and kimi.attention_scale == 192**-0.5
    ring = published("Ring-mini-linear-2.0")
    assert ring.mixers == (*(("delta",),) * 4, ("attention",)) * 4
    assert ring.expert_layers == (False, *(True,) * 19)
    assert (ring.rope.theta, ring.rope.partial, ring.head_norm) == (6e5, 0.5, "heads")
    assert ring.kept()[0] == (StateKV(16, 128 * 128),)
    assert decay_rates(16, 1, 20)[1] == pytest.approx(0.5, rel=2e-5)
    assert published("Qwen3.5-27B").experts is None
    assert published("Qwen3.5-27B").mixers[3::4] == (("attention",),) * 16


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_what_layers_keep(ranks: int) -> None:
    """Two states of 128 x 128 and three inputs of 128 + 128 + 256 channels for each key head."""
    config = published("Qwen3-Next-80B-A3B-Instruct")
    state = StateKV(16 // ranks, 2 * 128 * 128 + 3 * (128 + 128 + 2 * 128))
    assert set(config.kept(ranks)) == {(state,), (TokenKV(max(1, 2 // ranks), 2, 256),)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3Next", {"linear_num_value_heads": 24}, "linear_num_value_heads is 24; allowed: a multiple of"),
        ("Qwen3Next", {"attn_output_gate": False}, "attn_output_gate is false; allowed: true"),
        ("KimiLinear", {"mla_use_nope": False}, "mla_use_nope is false; allowed: true"),
        (
            "KimiLinear",
            {"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6]}},
            r"linear_attn_config.kda_layers is \[1, 2, 3, 5, 6\]; allowed: with full_attn_layers, each of",
        ),
        ("BailingMoeLinearV2", {"group_norm_size": 3}, "group_norm_size is 3; allowed: a divisor of"),
        ("BailingMoeLinearV2", {"use_qkv_bias": True}, "use_qkv_bias is true; allowed: false"),
        ("BailingMoeLinearV2", {"num_hidden_layers": 1}, "num_hidden_layers is 1; allowed: at least 2"),
        ("BailingMoeLinearV2", {"score_function": "softmax"}, 'score_function is "softmax"; allowed'),
        ("Qwen3_5", {"layer_types": ["full_attention"] * 3}, "allowed: 8 times full_attention or linear_"),
        ("Qwen3_5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ("Qwen3_5Moe", {"num_experts_per_tok": 257}, "num_experts_per_tok is 257; allowed: 1 to 256"),
    ],
)
def test_refusals(name: str, changes: Mapping[str, object], message: str) -> None:
    ring = PUBLISHED_STATES["Ring-mini-linear-2.0"] if name == "BailingMoeLinearV2" else {}
    fields = {"num_hidden_layers": 8, **ring, **changes}
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict({**BASE, **fields, "architectures": [f"{name}ForCausalLM"]})
