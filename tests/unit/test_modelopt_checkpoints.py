"""Checkpoints of ModelOpt, FP8 and NVFP4: what they stand for, how they are split, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.json_fields import Fields
from baton.models.methods.modelopt import read
from baton.process.options import ModelError
from tests.support.deep import all_deep_but
from tests.support.packed_checks import assert_split_alike, assert_stands_for, refusal, refusal_in_ranks
from tests.support.packed_models import (
    DENSE,
    LATENT,
    QWEN_MOE,
    Pack,
    change_config,
    change_tensor,
    copied,
    fp8,
    fp8_blocks,
    fp8_rows,
    nvfp4,
    save_packed,
)
from tests.support.tiny_models import Recipe

CONFIG: dict[str, object] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DENSE(tmp_path_factory.mktemp("dense") / "plain")


@pytest.fixture(scope="module")
def packed(dense: Path) -> tuple[Path, Path]:
    """A model with NVFP4, and the one that is meant."""
    return save_packed(dense, nvfp4, CONFIG)


@pytest.mark.parametrize("pack", [fp8, nvfp4])
@pytest.mark.parametrize(
    "recipe", all_deep_but(1, [DENSE, LATENT, QWEN_MOE]), ids=["dense", "latent", "mixture"]
)
def test_models(recipe: Recipe, pack: Pack, tmp_path: Path) -> None:
    """Projections that are computed as one have scales of their own."""
    config = CONFIG | {"quant_algo": "FP8" if pack is fp8 else "NVFP4"}
    path, meant = save_packed(recipe(tmp_path / "plain"), pack, config)
    assert_stands_for(path, meant)
    assert_split_alike(path, meant)


@pytest.mark.parametrize(
    ("algorithm", "pack"),
    [
        ("FP8_PER_CHANNEL_PER_TOKEN", fp8_rows),
        ("FP8_PB_WO", partial(fp8_blocks, size=32)),
        ("W4A16_NVFP4", partial(nvfp4, weight_only=True)),
    ],
)
def test_other_algorithms(algorithm: str, pack: Pack, dense: Path) -> None:
    group = {"group_size": 32} if algorithm == "FP8_PB_WO" else {}
    path, meant = save_packed(dense, pack, CONFIG | group | {"quant_algo": algorithm})
    assert_stands_for(path, meant)


def test_a_file_beside_the_config(dense: Path) -> None:
    """The file says which modules are plain, by wildcards, and that K and V have scales."""
    path, meant = save_packed(dense, fp8, CONFIG, ("layers.1.self_attn",))
    change_config(path, quantization_config=None)
    said: dict[str, object] = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.layers.1.self_attn*"],
    }
    file = path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": said}))
    assert_stands_for(path, meant)
    said["kv_cache_quant_algo"] = "FP8"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    config = ModelConfig.from_dir(path).quantization
    assert config is not None
    assert config.kv_scales
    file.write_text(json.dumps({"producer": {"name": "other"}, "quantization": said}))
    assert refusal(path) == 'hf_quant_config.json: producer.name is "other"; allowed: "modelopt"'


def test_mixed_precision(dense: Path) -> None:
    """Modules by name, and those below them; others are plain."""
    up = {f"model.layers.0.mlp.{name}_proj": fp8 for name in ("gate", "up", "down")}
    layers: dict[str, object] = {
        "model.layers.0.mlp": {"quant_algo": "FP8"},
        "model.layers.1.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    path, meant = save_packed(dense, nvfp4, config, ("self_attn", "1.mlp.gate", "1.mlp.up"), up)
    model = assert_stands_for(path, meant)
    assert model.scheme.description == "modelopt: fp4 by 16; fp8 by allxrow, activations fp8-tensor"


def nan(scales: Tensor) -> Tensor:
    return torch.full_like(scales.float(), float("nan")).to(scales.dtype)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("weight_scale_2", lambda _: None, "weight_scale_2 is missing"),
        ("weight_scale", nan, "weight_scale: a scale is not a finite number; allowed: finite numbers"),
        ("weight_scale_2", nan, "weight_scale_2: a scale is not a finite number; allowed: finite numbers"),
        ("input_scale", nan, "input_scale: a scale is not a finite number; allowed: finite numbers"),
        ("weight_scale", lambda t: t.float(), "weight_scale is float32; allowed: float8_e4m3fn, uint8"),
        ("weight", lambda t: t[:, :16], "weight has shape [64, 16]; expected [64, 32]"),
    ],
)
def test_tensors_that_are_refused(end: str, change: object, message: str, packed: tuple[Path, Path]) -> None:
    assert callable(change)
    path = change_tensor(copied(packed[0]), f"{Q}.{end}", change)
    assert refusal(path).endswith(f"tensor {Q}.{message}")


def test_configs_that_are_refused(packed: tuple[Path, Path]) -> None:
    path = copied(packed[0])
    change_config(path, quantization_config=CONFIG | {"group_size": 48})
    assert refusal(path).startswith(
        f"quantization_config: {Q} has groups of 48 inputs; allowed for inputs 0 to 64"
    )
    change_config(path, quantization_config=CONFIG | {"group_size": 64})
    assert "o_proj has groups of 64 inputs; allowed for inputs" in refusal_in_ranks(path)
    change_config(path, quantization_config=CONFIG | {"ignore": ["*k_proj"]})
    assert refusal(path).startswith(f"quantization_config: {Q} is fp4 by 16, {K} is plain; allowed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_algo", "NVFP4_AWQ"),
        ("kv_cache_quant_algo", "NVFP4"),
        ("ignore", "lm_head"),
        ("group_size", 15),
    ],
)
def test_fields_that_are_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"^config.json: {field} is .*{value}.*; allowed: "):
        read(Fields(CONFIG | {field: value}, "config.json"))
