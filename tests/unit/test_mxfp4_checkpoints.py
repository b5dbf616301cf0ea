"""Checkpoints of gpt-oss, whose experts are MXFP4: what they stand for, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.packed_checks import assert_split_alike, assert_stands_for, refusal, refusal_in_ranks
from tests.support.packed_models import (
    GPT_OSS,
    change_config,
    change_tensor,
    copied,
    mxfp4,
    save_packed,
)

CONFIG: dict[str, object] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with MXFP4, and the one that is meant."""
    return save_packed(GPT_OSS(tmp_path_factory.mktemp("gpt-oss") / "plain"), mxfp4, CONFIG, ("self_attn",))


def test_experts(packed: tuple[Path, Path]) -> None:
    path, meant = packed
    tensors, weights = load_file(path / "model.safetensors"), load_file(meant / "model.safetensors")
    for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
        stored = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        assert torch.equal(convert_moe_packed_tensors(*stored, dtype=torch.float32), weights[name])
    assert assert_stands_for(path, meant).scheme.description == "mxfp4: fp4 by 32"
    assert_split_alike(path, meant)


def test_some_experts(tmp_path: Path) -> None:
    """The experts of a layer may be plain."""
    config = CONFIG | {"modules_to_not_convert": [r"model.layers.1.mlp.experts", "self_attn"]}
    plain = GPT_OSS(tmp_path / "plain")
    path, meant = save_packed(plain, mxfp4, config, ("self_attn", "layers.1.mlp.experts"))
    assert_stands_for(path, meant)


def not_a_number(scales: Tensor) -> Tensor:
    return scales.index_fill(0, torch.tensor([2]), 255)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("gate_up_proj_scales", lambda _: None, "gate_up_proj_scales is missing"),
        (
            "down_proj_scales",
            not_a_number,
            "down_proj_scales: a scale is not a finite number; allowed: finite",
        ),
        (
            "down_proj_scales",
            lambda t: t.float(),
            "down_proj_scales is float32; allowed: float8_e8m0fnu, uint8",
        ),
        (
            "down_proj_blocks",
            lambda t: t[:, :32],
            "down_proj_blocks has shape [4, 32, 2, 16]; expected [4, 64, 2, 16]",
        ),
    ],
)
def test_tensors_that_are_refused(end: str, change: object, message: str, packed: tuple[Path, Path]) -> None:
    assert callable(change)
    path = change_tensor(copied(packed[0]), f"{EXPERTS}.{end}", change)
    assert f"tensor {EXPERTS}.{message}" in refusal(path)


def test_slices_that_end_within_a_group(tmp_path: Path) -> None:
    recipe = replace(GPT_OSS, overrides={**GPT_OSS.overrides, "intermediate_size": 96})
    path, _ = save_packed(recipe(tmp_path / "plain"), mxfp4, CONFIG, ("self_attn",))
    assert refusal_in_ranks(path) == (
        f"quantization_config: {EXPERTS}.down_proj has groups of 32 inputs; allowed for inputs 0 to 48: "
        "groups that divide them (--tensor-parallel-size decides which a rank has)"
    )


def test_patterns_that_are_refused(packed: tuple[Path, Path]) -> None:
    path = copied(packed[0])
    change_config(path, quantization_config=CONFIG | {"modules_to_not_convert": ["*.experts"]})
    assert "modules_to_not_convert" in refusal(path)
