"""The bytes that models keep of a token and of a sequence are those of formulas over their published sizes.

``pytest -rP tests/unit/test_bytes_kept.py`` prints both, model by model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

import pytest
import torch

from baton.models import mixer_config
from baton.models.config import ModelConfig
from baton.models.loader import kv_layout, new_page_pool
from baton.models.mixer_config import MixerKind
from baton_kernels.kv_layout import KVGroup, KVLayout, StateKV, TokenKV
from tests.support.family_cases import FULL
from tests.support.family_models import FAMILY_MODELS, MODELS_OF
from tests.support.published_configs import PUBLISHED
from tests.support.published_states import PUBLISHED_STATES
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_mambas import MAMBAS
from tests.support.tiny_models import ModelDir
from tests.support.tiny_states import STATES as STATE_MODELS

BLOCK_SIZE = 16
FLOAT32 = 4
WINDOWS = ("mistral", "gemma3", "gpt-oss", "llama4")
FIRSTS = [names[0] for names in MODELS_OF.values()]
NEW = [name for name in FIRSTS if name in {**LATENTS, **STATE_MODELS, **MAMBAS}]
TINY = FAMILY_MODELS if FULL else (*WINDOWS, *NEW)


@dataclass(frozen=True)
class KV:
    """Layers with K and V of each token."""

    layers: int
    heads: int
    dim: int

    def numbers(self) -> int:
        return self.layers * 2 * self.heads * self.dim

    def __str__(self) -> str:
        return f"{self.layers} x 2 x {self.heads} x {self.dim}"


@dataclass(frozen=True)
class Latent:
    """Layers with one latent and one rotated key of each token."""

    layers: int
    kv_lora_rank: int
    rope: int

    def numbers(self) -> int:
        return self.layers * (self.kv_lora_rank + self.rope)

    def __str__(self) -> str:
        return f"{self.layers} x ({self.kv_lora_rank} + {self.rope})"


@dataclass(frozen=True)
class State:
    """Layers with a state of float32 numbers: what is recurrent, and the last inputs of convolutions."""

    layers: int
    recurrent: tuple[int, ...]
    channels: int = 0
    taps: int = 0

    def numbers(self) -> int:
        return self.layers * (prod(self.recurrent) * bool(self.recurrent) + self.channels * self.taps)

    def __str__(self) -> str:
        recurrent = " x ".join(map(str, self.recurrent)) or "0"
        return f"{self.layers} x ({recurrent} + {self.channels} x {self.taps})"


@dataclass(frozen=True)
class Kept:
    """The formula of a model: full and windowed layers of each token, and the state of a sequence."""

    full: KV | Latent | None = None
    window: KV | None = None
    state: State | None = None


PUBLISHED_KEPT: Mapping[str, Kept] = {
    "gemma-2-9b-it": Kept(KV(21, 8, 256), KV(21, 8, 256)),
    "gemma-3-1b-it": Kept(KV(4, 1, 256), KV(22, 1, 256)),
    "gemma-3-4b-it": Kept(KV(5, 4, 256), KV(29, 4, 256)),
    "glm-4-9b-chat-hf": Kept(KV(40, 2, 128)),
    "GLM-4-9B-0414": Kept(KV(40, 2, 128)),
    "Phi-3-mini-128k-instruct": Kept(window=KV(32, 32, 96)),
    "Phi-4-mini-instruct": Kept(window=KV(32, 8, 128)),
    "phi-4": Kept(KV(40, 10, 128)),
    "granite-3.3-8b-instruct": Kept(KV(40, 8, 128)),
    "OLMo-2-1124-7B": Kept(KV(32, 32, 128)),
    "Olmo-3-7B-Instruct": Kept(KV(8, 32, 128), KV(24, 32, 128)),
    "SmolLM3-3B": Kept(KV(36, 4, 128)),
    "Seed-OSS-36B-Instruct": Kept(KV(64, 8, 128)),
    "ERNIE-4.5-0.3B-PT": Kept(KV(18, 2, 128)),
    "c4ai-command-r7b-12-2024": Kept(KV(8, 8, 128), KV(24, 8, 128)),
    "internlm3-8b-instruct": Kept(KV(48, 2, 128)),
    "starcoder2-15b": Kept(window=KV(40, 4, 128)),
    "Ministral-8B-Instruct-2410": Kept(KV(12, 8, 128), KV(24, 8, 128)),
    "Mistral-Small-3.1-24B-Instruct-2503": Kept(KV(40, 8, 128)),
    "Ministral-3-8B-Instruct-2512": Kept(KV(34, 8, 128)),
    "Hunyuan-7B-Instruct": Kept(KV(32, 8, 128)),
    "DeepSeek-V2-Lite": Kept(Latent(27, 512, 64)),
    "DeepSeek-V2-Chat": Kept(Latent(60, 512, 64)),
    "DeepSeek-V3-bf16": Kept(Latent(61, 512, 64)),
    "Moonlight-16B-A3B-Instruct": Kept(Latent(27, 512, 64)),
    "MiniCPM3-4B": Kept(Latent(62, 256, 32)),
    "GLM-4.7-Flash": Kept(Latent(47, 512, 64)),
    "Mistral-Small-4-119B-2603": Kept(Latent(36, 256, 64)),
    # B and C of each two heads.
    "Nemotron-H-8B-Base-8K": Kept(KV(4, 8, 128), state=State(24, (128, 64, 128), 8192 + 2 * 64 * 128, 3)),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Kept(
        KV(6, 2, 128), state=State(23, (64, 64, 128), 4096 + 2 * 32 * 128, 3)
    ),
    "granite-4.0-h-1b": Kept(KV(4, 4, 128), state=State(36, (48, 64, 128), 3072 + 2 * 24 * 128, 3)),
    "Falcon-H1-0.5B-Base": Kept(KV(36, 2, 64), state=State(36, (24, 64, 128), 1536 + 2 * 12 * 128, 3)),
    "Bamba-9B-v2": Kept(KV(3, 8, 128), state=State(29, (128, 64, 128), 8192 + 2 * 64 * 128, 3)),
    "LFM2-1.2B": Kept(KV(6, 8, 64), state=State(10, (), 2048, 2)),
    "LFM2-8B-A1B": Kept(KV(6, 8, 64), state=State(18, (), 2048, 2)),
    "Qwen3-Next-80B-A3B-Instruct": Kept(
        KV(12, 2, 256), state=State(36, (32, 128, 128), (2 * 16 + 32) * 128, 3)
    ),
    "Kimi-Linear-48B-A3B-Instruct": Kept(
        Latent(7, 512, 64), state=State(20, (32, 128, 128), 3 * 32 * 128, 3)
    ),
    "Ring-mini-linear-2.0": Kept(KV(4, 4, 128), state=State(16, (16, 128, 128))),
    "Qwen3.5-27B": Kept(KV(16, 4, 256), state=State(48, (48, 128, 128), (2 * 16 + 48) * 128, 3)),
    "Qwen3.5-35B-A3B": Kept(KV(10, 2, 256), state=State(30, (32, 128, 128), (2 * 16 + 32) * 128, 3)),
}


def measured(group: KVGroup | None, element: int) -> int:
    """Bytes that the layout has for a group: of each token or, of states, of a sequence."""
    if group is None:
        return 0
    if isinstance(group.kv, StateKV):
        return len(group.layers) * group.kv.units * group.kv.size * FLOAT32
    return len(group.layers) * group.kv.size * element


def check(name: str, config: ModelConfig, kept: Kept, dtype: torch.dtype) -> None:
    """Prints and compares what a layout has and what the formula says."""
    layout, element = kv_layout(config, BLOCK_SIZE, dtype), dtype.itemsize
    by_kind = {group.kind: group for group in layout.groups}
    assert len(by_kind) == len(layout.groups) == sum(part is not None for part in vars(kept).values())
    of_full = by_kind.get("full", by_kind.get("latent"))
    told: list[str] = []
    parts = (
        ("token", of_full, kept.full, element),
        ("token in the window", by_kind.get("window"), kept.window, element),
    )
    for unit, group, part, size in (*parts, ("sequence", layout.state, kept.state, FLOAT32)):
        found = measured(group, size)
        assert found == (0 if part is None else part.numbers() * size), (name, unit)
        if part is not None:
            told.append(f"{found} bytes a {unit} = {part} x {size}")
    print(f"{name}: {'; '.join(told)}; {layout.lost:.1%} of a sequence's pages is nobody's")
    assert isinstance(kept.full, Latent) is ("latent" in by_kind)
    check_pages(layout)


def check_pages(layout: KVLayout) -> None:
    """The cells of all layers, and of all units, have room in the pages of a block or of a state."""
    for group in layout.groups:
        kv = group.kv
        cells = len(group.layers) * (kv.units if isinstance(kv, StateKV) else 1)
        tokens = layout.block_size if isinstance(kv, TokenKV) else 1
        cell = kv.size * (FLOAT32 if isinstance(kv, StateKV) else tokens * layout.element_bytes)
        assert group.per_page * cell <= layout.page_bytes
        assert len(group.tables) == ceil(cells / group.per_page)


@pytest.mark.parametrize("name", PUBLISHED_KEPT)
def test_published_models(name: str) -> None:
    raw = {**PUBLISHED, **PUBLISHED_STATES}[name]
    check(name, ModelConfig.from_dict(raw), PUBLISHED_KEPT[name], torch.bfloat16)


def test_every_published_config_has_its_formula() -> None:
    assert PUBLISHED_KEPT.keys() == {**PUBLISHED, **PUBLISHED_STATES}.keys()


def field_of(fields: Mapping[str, int], *names: str) -> int:
    return next(fields[name] for name in names if fields.get(name) is not None)


def state_of(fields: Mapping[str, int], config: ModelConfig, layers: int) -> State:
    """The state's formula by the fields of a config.json."""
    if "linear_num_key_heads" in fields:
        heads, key, value = (
            fields[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim")
        )
        channels = 2 * fields["linear_num_key_heads"] * key + heads * value
        return State(layers, (heads, key, value), channels, fields["linear_conv_kernel_dim"] - 1)
    if "linear_num_heads" in fields:
        heads, size = fields["linear_num_heads"], fields["linear_head_dim"]
        return State(layers, (heads, size, size), 3 * heads * size, fields["linear_conv_kernel_dim"] - 1)
    if "layer_group_size" in fields:
        return State(layers, (fields["num_attention_heads"], fields["head_dim"], fields["head_dim"]))
    if "conv_L_cache" in fields:
        return State(layers, (), fields["hidden_size"], fields["conv_L_cache"] - 1)
    assert config.mamba is not None
    heads = field_of(fields, "mamba_num_heads", "mamba_n_heads")
    size = field_of(fields, "mamba_head_dim", "mamba_d_head")
    state = field_of(fields, "ssm_state_size", "mamba_d_state")
    channels = heads * size + 2 * config.mamba.units * state
    return State(layers, (heads, size, state), channels, field_of(fields, "conv_kernel", "mamba_d_conv") - 1)


def formula_of(path: Path, config: ModelConfig) -> Kept:
    """The formula by the sizes in a config.json, and by the mixers of each layer."""
    raw = json.loads((path / "config.json").read_text())
    fields = raw.get("text_config", raw)
    mixers: list[tuple[MixerKind, int]] = [
        (mixer, layer) for layer in range(config.num_layers) for mixer in config.mixers_of(layer)
    ]
    latent = sum(mixer == "latent" for mixer, _ in mixers)
    full, window = (
        sum(mixer == "attention" and (config.windows[layer] is not None) is seen for mixer, layer in mixers)
        for seen in (False, True)
    )
    states = sum(mixer in mixer_config.STATES for mixer, _ in mixers)
    assert not latent or not full
    heads = fields.get("num_key_value_heads") or fields["num_attention_heads"]
    dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    of_all: KV | Latent | None = KV(full, heads, dim) if full else None
    if latent:
        of_all = Latent(latent, fields["kv_lora_rank"], fields["qk_rope_head_dim"])
    return Kept(
        of_all,
        KV(window, heads, dim) if window else None,
        state_of(fields, config, states) if states else None,
    )


@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    config = ModelConfig.from_dir(path)
    check(name, config, formula_of(path, config), torch.float32)


@pytest.mark.parametrize("name", ["deepseek-v2", "qwen3-next"])
def test_a_pool_takes_as_many_bytes(name: str, model_dir: ModelDir) -> None:
    layout = kv_layout(ModelConfig.from_dir(model_dir(name)), BLOCK_SIZE, torch.bfloat16)
    assert new_page_pool(layout, 7, torch.bfloat16, "cpu").nbytes == 7 * layout.page_bytes
