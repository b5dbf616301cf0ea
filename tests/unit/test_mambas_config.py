"""config.json of the families with Mamba-2 layers or short convolutions: what a missing field means, what
published ones mean, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    PretrainedConfig,
)

from baton.models.config import ModelConfig, RopeConfig
from baton.models.mixer_config import ConvConfig, MambaConfig, mamba_units
from baton.process.options import ModelError
from baton_kernels.activation_kind import RELU2, Activation
from baton_kernels.kv_layout import StateKV
from baton_kernels.routing_rule import Routing
from tests.support.published_configs import PUBLISHED

BASE: dict[str, object] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, object]]] = {
    "NemotronH": (NemotronHConfig, {"hybrid_override_pattern": "ME*-"}),
    "GraniteMoeHybrid": (GraniteMoeHybridConfig, {}),
    "FalconH1": (FalconH1Config, {}),
    "Bamba": (BambaConfig, {}),
    "Lfm2": (Lfm2Config, {}),
    "Lfm2Moe": (Lfm2MoeConfig, {"layer_types": ["conv", "full_attention"] * 2}),
}


def family(name: str, /, **changes: object) -> ModelConfig:
    needed = FAMILIES[name][1]
    return ModelConfig.from_dict({"architectures": [f"{name}ForCausalLM"], **BASE, **needed, **changes})


def published(name: str) -> ModelConfig:
    return ModelConfig.from_dict(PUBLISHED[name])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FAMILIES),
        ("Bamba", {"attn_layer_indices": [1]}),
        ("FalconH1", {"mamba_d_ssm": None}),
        ("FalconH1", {"ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0], "mlp_multipliers": [0.5, 2.0]}),
        ("GraniteMoeHybrid", {"position_embedding_type": "rope", "num_local_experts": 0}),
        ("GraniteMoeHybrid", {"time_step_limit": [0.1, 2.0]}),
        ("Lfm2", {"full_attn_idxs": [1], "block_ffn_dim_multiplier": 1.3}),
        ("Lfm2", {"block_ff_dim": 96, "block_multiple_of": 32, "tie_embedding": False}),
    ],
)
def test_missing_fields_mean_what_they_mean_to_transformers(name: str, changes: dict[str, object]) -> None:
    make, needed = FAMILIES[name]
    theirs = make(**{**BASE, **needed, **changes}).to_dict()
    written = {field: value for field, value in theirs.items() if field != "architectures"}
    without_ids = [
        replace(config, eos_token_ids=(), bos_token_id=None)
        for config in (family(name, **changes), family(name, **written))
    ]
    assert without_ids[0] == without_ids[1]


def test_nemotron() -> None:
    dense, nano = published("Nemotron-H-8B-Base-8K"), published("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert dense.num_layers == nano.num_layers == 52
    assert dense.mixers[:9] == (
        ("mamba",),
        (),
        ("mamba",),
        (),
        ("mamba",),
        (),
        ("mamba",),
        ("attention",),
        (),
    )
    assert [dense.has_mlp(layer) for layer in range(9)] == [False, True] * 3 + [False, False, True]
    assert dense.mamba == MambaConfig(128, 64, 8, 128, 4, units=64)
    assert dense.ropes == (None,) * 52
    assert (dense.activation, dense.gated_mlp, dense.experts) == (RELU2, False, None)
    assert sum(mixers == ("attention",) for mixers in nano.mixers) == 6
    assert nano.expert_layers == tuple(not mixers for mixers in nano.mixers)
    assert nano.experts is not None and not nano.experts.gated
    assert nano.experts.routing == Routing(6, "sigmoid", renormalize=True, scale=2.5)
    assert nano.mamba is not None
    # 2 heads of [64, 128] and 3 inputs of their 128 x, 128 B and 128 C in each unit.
    assert nano.mamba.kept(1) == StateKV(32, 2 * 64 * 128 + 3 * 384)
    assert nano.mamba.kept(4) == StateKV(8, 2 * 64 * 128 + 3 * 384)
    new_names = family("NemotronH", layers_block_type=["linear_attention", "moe", "full_attention", "mlp"])
    assert new_names == family("NemotronH", layers_block_type=["mamba", "moe", "attention", "mlp"])
    assert family("NemotronH", moe_latent_size=12).experts == replace(
        family("NemotronH").experts or pytest.fail("no experts"), latent=12
    )


def test_granite() -> None:
    config = published("granite-4.0-h-1b")
    assert [layer for layer in range(40) if config.mixers_of(layer) == ("attention",)] == [5, 15, 25, 35]
    assert config.mamba == MambaConfig(48, 64, 1, 128, 4, units=24)
    assert config.intermediate_size == 4096 and config.experts is None
    assert config.ropes == (None,) * 40
    assert (config.embedding_scale, config.scale, config.residual_scale) == (12.0, 0.0078125, 0.22)


def test_falcon() -> None:
    config = published("Falcon-H1-0.5B-Base")
    assert config.mixers == (("mamba", "attention"),) * 36
    assert config.scale == pytest.approx(64**-0.5 * 0.390625)
    assert config.activation == Activation("scaled_silu", 0.8838834764831844)
    assert config.mlp_factor == 0.5859375
    assert dict(config.mixer_factors) == {"mamba": 0.23570226039551587, "attention": 0.9375}
    assert config.mamba is not None and not config.mamba.norm
    root = 0.3535533905932738
    assert config.mamba.factors == tuple(1.25 * factor for factor in (root, 0.25, root, 0.5, root))
    both = family("FalconH1", attention_in_multiplier=3.0, attention_out_multiplier=0.5)
    assert both.scale == pytest.approx(9 * both.head_dim**-0.5)
    assert dict(both.mixer_factors)["attention"] == 1.5


def test_bamba_and_lfm2() -> None:
    bamba = published("Bamba-9B-v2")
    assert [layer for layer in range(32) if bamba.mixers_of(layer) == ("attention",)] == [9, 18, 27]
    assert bamba.rope == RopeConfig(partial=0.5)
    dense, moe = published("LFM2-1.2B"), published("LFM2-8B-A1B")
    assert dense.intermediate_size == 8192 and moe.intermediate_size == 7168
    assert [layer for layer in range(16) if dense.mixers_of(layer) == ("attention",)] == [2, 5, 8, 10, 12, 14]
    assert dense.conv == moe.conv == ConvConfig(2048, 3, units=8)
    assert dense.conv.kept(2) == StateKV(4, 256 * 2)
    assert dense.tie_word_embeddings and moe.tie_word_embeddings
    assert moe.expert_layers == (False,) * 2 + (True,) * 22


def test_units() -> None:
    assert [mamba_units(heads, groups) for heads, groups in ((128, 8), (48, 1), (24, 1), (32, 2))] == [
        64,
        24,
        12,
        16,
    ]
    assert [mamba_units(heads, groups) for heads, groups in ((64, 16), (12, 3), (7, 1), (22, 11))] == [
        32,
        6,
        1,
        11,
    ]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "NemotronH",
            {"hybrid_override_pattern": "MX"},
            'hybrid_override_pattern is "MX"; allowed: one or more of M',
        ),
        (
            "NemotronH",
            {"layers_block_type": ["mamba", "conv"]},
            'layers_block_type is ["mamba", "conv"]; allowed',
        ),
        ("NemotronH", {"n_groups": 7}, "n_groups is 7; allowed: a divisor of mamba_num_heads (128)"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, 'mlp_hidden_act is "silu"; allowed: "relu2"'),
        ("NemotronH", {"conv_kernel": 1}, "conv_kernel is 1; allowed: a whole number of at least 2"),
        ("NemotronH", {"tie_word_embeddings": True}, "tie_word_embeddings is true; allowed: false"),
        ("NemotronH", {"n_shared_experts": 2}, "n_shared_experts is 2; allowed: 1"),
        (
            "GraniteMoeHybrid",
            {"layer_types": ["mamba"]},
            'layer_types is ["mamba"]; allowed: 4 times one of mamba',
        ),
        (
            "GraniteMoeHybrid",
            {"mamba_n_heads": 7},
            "mamba_n_heads is 7; allowed: a divisor of the layer's inner size (128)",
        ),
        ("GraniteMoeHybrid", {"mamba_d_head": 3}, 'mamba_d_head is 3; allowed: "auto" or 1'),
        ("GraniteMoeHybrid", {"time_step_limit": [1]}, "time_step_limit is [1]; allowed: two numbers"),
        ("GraniteMoeHybrid", {"time_step_limit": [2, 1]}, "time_step_limit is [2, 1]; allowed: two numbers"),
        (
            "GraniteMoeHybrid",
            {"hidden_act": "gelu_pytorch_tanh"},
            'hidden_act is "gelu_pytorch_tanh"; allowed: "silu"',
        ),
        (
            "GraniteMoeHybrid",
            {"position_embedding_type": "alibi"},
            'position_embedding_type is "alibi"; allowed: "rope"',
        ),
        ("FalconH1", {"mlp_multipliers": [1.0]}, "mlp_multipliers is [1.0]; allowed: 2 numbers above 0"),
        (
            "FalconH1",
            {"ssm_multipliers": [1, 1, 1, 1, -1]},
            "ssm_multipliers is [1, 1, 1, 1, -1]; allowed: 5 numbers",
        ),
        (
            "FalconH1",
            {"attention_bias": True, "attention_in_multiplier": 2.0},
            "attention_in_multiplier is 2.0; allowed: 1 with attention_bias",
        ),
        (
            "FalconH1",
            {"mamba_proj_bias": True, "ssm_in_multiplier": 2.0},
            "ssm_in_multiplier is 2.0; allowed: 1 with mamba_proj_bias",
        ),
        (
            "Bamba",
            {"attn_layer_indices": [4]},
            "attn_layer_indices is [4]; allowed: a list of layers, each 0 to 3",
        ),
        ("Lfm2", {"layer_types": ["conv"] * 3}, "allowed: 4 times full_attention or conv"),
        ("Lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1; allowed: a whole number of at least 2"),
        ("Lfm2Moe", {"num_experts_per_tok": 33}, "num_experts_per_tok is 33; allowed: 1 to 32"),
    ],
)
def test_refusals(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        family(name, **changes)
