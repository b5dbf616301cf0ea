"""Checkpoints of AWQ: what they stand for, how they are split, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.json_fields import Fields
from baton.models.methods.awq import read
from baton.process.options import ModelError
from tests.support.packed_checks import assert_split_alike, assert_stands_for, refusal, refusal_in_ranks
from tests.support.packed_models import (
    DENSE,
    LATENT,
    MIXTRAL,
    awq,
    change_config,
    change_tensor,
    copied,
    save_packed,
)
from tests.support.tiny_models import Recipe

pytestmark = pytest.mark.deep

CONFIG: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def symmetric(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model without zero points, and the one that is meant."""
    plain = DENSE(tmp_path_factory.mktemp("dense") / "plain")
    return save_packed(plain, partial(awq, symmetric=True), CONFIG | {"zero_point": False})


@pytest.mark.parametrize("recipe", [DENSE, LATENT], ids=["dense", "latent"])
def test_zero_points(recipe: Recipe, tmp_path: Path) -> None:
    path, meant = save_packed(recipe(tmp_path / "plain"), awq, CONFIG)
    assert_stands_for(path, meant)
    assert_split_alike(path, meant)


def test_experts(tmp_path: Path) -> None:
    """Mixtral, as AutoAWQ writes it: parts of the names of modules that are plain."""
    config = CONFIG | {"modules_to_not_convert": ["gate", "1.self_attn"]}
    path, meant = save_packed(MIXTRAL(tmp_path / "plain"), awq, config, ("1.self_attn",))
    assert_stands_for(path, meant)
    assert_split_alike(path, meant)


def test_symmetric(symmetric: tuple[Path, Path]) -> None:
    assert assert_stands_for(*symmetric).scheme.description == "awq: int4 by 32"


def nan(scales: Tensor) -> Tensor:
    return scales.index_fill(0, torch.tensor([0]), float("nan"))


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("qzeros", lambda _: None, "qzeros is missing"),
        ("scales", nan, "scales: a scale is not a finite number; allowed: finite numbers"),
        ("qweight", lambda t: t.view(8, 64), "qweight has shape [8, 64]; expected [64, 8]"),
        ("qzeros", lambda t: t + 1, "qzeros: a zero point is not 8; allowed where zero_point is false: 8"),
    ],
)
def test_tensors_that_are_refused(
    end: str, change: object, message: str, symmetric: tuple[Path, Path]
) -> None:
    assert callable(change)
    path = change_tensor(copied(symmetric[0]), f"{Q}.{end}", change)
    assert refusal(path).endswith(f"tensor {Q}.{message}")


def test_groups_that_do_not_divide(symmetric: tuple[Path, Path]) -> None:
    path = copied(symmetric[0])
    change_config(path, quantization_config=CONFIG | {"group_size": 64})
    assert "o_proj has groups of 64 inputs" in refusal_in_ranks(path)
    change_config(path, quantization_config=CONFIG | {"modules_to_not_convert": ["k_proj"]})
    assert refusal(path) == (
        f"quantization_config: {Q} is int4 by 32 with zero points, model.layers.0.self_attn.k_proj is plain; "
        "allowed for weights that are computed as one: the same"
    )


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("bits", 8, "4"), ("version", "gemv", '"gemm"'), ("group_size", 0, "a whole")],
)
def test_fields_that_are_refused(field: str, value: object, allowed: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is .*{value}.*; allowed: {allowed}"):
        read(Fields(CONFIG | {field: value}, "config.json"))
