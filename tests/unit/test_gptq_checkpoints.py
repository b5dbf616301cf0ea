"""Checkpoints of GPTQ: what they stand for, how they are split, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.json_fields import Fields
from baton.models.loader import load_model
from baton.models.methods.gptq import read
from baton.process.options import ModelError
from tests.support.packed_checks import (
    assert_split_alike,
    assert_stands_for,
    logits_of,
    refusal,
    refusal_in_ranks,
)
from tests.support.packed_models import (
    DENSE,
    LATENT,
    QWEN_MOE,
    Packed,
    add_tensors,
    change_config,
    change_tensor,
    copied,
    gptq,
    save_packed,
)

pytestmark = pytest.mark.deep

CONFIG: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DENSE(tmp_path_factory.mktemp("dense") / "plain")


@pytest.fixture(scope="module")
def packed(dense: Path) -> Path:
    """Symmetric weights in groups of 32."""
    return save_packed(dense, gptq, CONFIG | {"sym": True})[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_dense_models(bits: int, version: int, dense: Path) -> None:
    """One format has symmetric weights here, the other zero points of their own."""
    form = {"bits": bits, "sym": version == 1, "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}
    pack = partial(gptq, bits=bits, symmetric=version == 1, version=version)
    path, meant = save_packed(dense, pack, CONFIG | form)
    assert_stands_for(path, meant)
    assert_split_alike(path, meant)


def test_zero_points_of_the_first_format_borrow(dense: Path) -> None:
    """A zero point of 0 is stored as one less: the words are smaller by one number."""
    pack = partial(gptq, symmetric=False)
    assert_stands_for(*save_packed(dense, pack, CONFIG | {"sym": False}))


@pytest.mark.parametrize(("symmetric", "group"), [(True, 16), (False, None)])
def test_latent_attention(symmetric: bool, group: int | None, tmp_path: Path) -> None:
    pack = partial(gptq, symmetric=symmetric, group=group)
    config = CONFIG | {"sym": symmetric, "group_size": group or -1}
    path, meant = save_packed(LATENT(tmp_path / "plain"), pack, config)
    assert_stands_for(path, meant)
    if group:
        assert_split_alike(path, meant)


def test_experts(tmp_path: Path) -> None:
    pack = partial(gptq, symmetric=False, group=16, version=2)
    config = CONFIG | {"sym": False, "group_size": 16, "checkpoint_format": "gptq_v2"}
    path, meant = save_packed(QWEN_MOE(tmp_path / "plain"), pack, config)
    assert_stands_for(path, meant)
    assert_split_alike(path, meant)
    change_config(path, quantization_config=config | {"desc_act": True})
    assert refusal(path) == (
        "quantization_config: desc_act of model.layers.0.mlp.experts.0.gate_proj is true; allowed for "
        "experts: false"
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_order_of_activations(bits: int, dense: Path) -> None:
    """Inputs belong to groups in any order, the same for projections that are computed as one."""

    def pack(weight: Tensor) -> Packed:
        return gptq(weight, bits=bits, order=torch.Generator().manual_seed(weight.shape[1]))

    path, meant = save_packed(dense, pack, CONFIG | {"bits": bits, "desc_act": True})
    model = assert_stands_for(path, meant)
    assert "in the order of activations" in model.scheme.description
    assert refusal_in_ranks(path).endswith(
        "down_proj.g_idx: inputs are in groups in an order of their own; allowed in a rank's part of them: "
        "groups in the order of the inputs"
    )
    change_tensor(path, f"{K}.g_idx", lambda groups: groups.flip(0))
    assert refusal(path) == (
        f"tensor {K}.g_idx is not {Q}.g_idx; allowed for projections that are computed as one: the same "
        "groups"
    )
    change_tensor(path, f"{K}.g_idx", lambda groups: groups.flip(0))
    change_tensor(path, f"{DOWN}.g_idx", torch.zeros_like)
    assert refusal(path) == (
        f"tensor {DOWN}.g_idx has a group of other than 32 inputs; allowed: 4 groups of that size"
    )


def test_order_of_activations_that_is_that_of_the_inputs(packed: Path, dense: Path) -> None:
    """Groups that follow each other, whatever the config allows, are split like others."""
    path = copied(packed)
    change_config(path, quantization_config=CONFIG | {"desc_act": True})
    assert_split_alike(path, dense)


def test_modules_with_rules_of_their_own(dense: Path) -> None:
    """One module is plain, one has other codes, and one a bias of zeros, which changes nothing."""
    o_proj = "model.layers.0.self_attn.o_proj"
    rules = {
        r"-:.*\.1\.mlp\.down_proj": {},
        r"+:.*layers\.0\.self_attn\.o_proj$": {"bits": 8, "group_size": 16},
    }
    config, others = CONFIG | {"dynamic": rules}, {o_proj: partial(gptq, bits=8, group=16)}
    path, meant = save_packed(dense, gptq, config, ("layers.1.mlp.down_proj",), others)
    add_tensors(path, {f"{Q}.bias": torch.zeros(64)})
    assert_stands_for(path, meant)


def test_lists_of_modules() -> None:
    """A list, or lists, of the modules of each layer; the head only by its own field."""
    named = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    checkpoint = read(Fields(CONFIG | named | {"lm_head": True}, "config.json"))
    assert checkpoint.spec_of("model.layers.3.mlp.up_proj") is not None
    assert checkpoint.spec_of("model.layers.3.mlp.down_proj") is None
    assert read(Fields(CONFIG, "config.json")).spec_of("lm_head") is None
    assert read(Fields(CONFIG | {"lm_head": True}, "config.json")).spec_of("lm_head") is not None


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("bits", 3, "4 or 8"),
        ("group_size", 33, "-1 or an even number"),
        ("checkpoint_format", "marlin", '"gptq" or "gptq_v2"'),
        ("pack_dtype", "int64", '"int32"'),
    ],
)
def test_fields_that_are_refused(field: str, value: object, allowed: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is .*{value}.*; allowed: {allowed}"):
        read(Fields(CONFIG | {field: value}, "config.json"))


def test_dynamic_fields_that_are_refused() -> None:
    with pytest.raises(ModelError, match=r"dynamic.*regular expressions"):
        read(Fields(CONFIG | {"dynamic": {"+:(": {}}}, "config.json"))
    with pytest.raises(ModelError, match="adapter"):
        read(Fields(CONFIG | {"dynamic": {".*": {"adapter": {}}}}, "config.json"))
    with pytest.raises(ModelError, match="bits is 2"):
        read(Fields(CONFIG | {"dynamic": {".*": {"bits": 2}}}, "config.json"))


def nan(scales: Tensor) -> Tensor:
    return scales.index_fill(0, torch.tensor([0]), float("nan"))


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("scales", lambda _: None, f"tensor {Q}.scales is missing"),
        ("scales", nan, f"tensor {Q}.scales: a scale is not a finite number; allowed: finite numbers"),
        ("scales", lambda t: t[:1], f"tensor {Q}.scales has shape [1, 64]; expected [2, 64]"),
        ("qweight", lambda t: t[:4], f"tensor {Q}.qweight has shape [4, 64]; expected [8, 64]"),
        ("qweight", lambda t: t.long(), f"tensor {Q}.qweight is int64; allowed: int32"),
        (
            "qzeros",
            lambda t: t + 1,
            f"tensor {Q}.qzeros: a zero point is not 8; allowed where sym is true: 8",
        ),
        (
            "scales",
            lambda t: torch.full(t.shape, 1e-7, dtype=torch.bfloat16),
            f"tensor {Q}.scales: a scale is no number of float16; allowed: numbers of float16",
        ),
        (
            "g_idx",
            lambda t: t.flip(0),
            f"tensor {Q}.g_idx: inputs are in groups in an order of their own; allowed with this desc_act "
            "and group_size: groups in the order of the inputs",
        ),
    ],
)
def test_tensors_that_are_refused(end: str, change: object, message: str, packed: Path) -> None:
    assert callable(change)
    assert refusal(change_tensor(copied(packed), f"{Q}.{end}", change)).endswith(message)


def test_groups_that_do_not_divide(packed: Path) -> None:
    path = copied(packed)
    change_config(path, quantization_config=CONFIG | {"group_size": 48})
    assert refusal(path).startswith(
        f"quantization_config: {Q} has groups of 48 inputs; allowed for inputs 0 to 64"
    )
    change_config(path, quantization_config=CONFIG | {"group_size": 64})
    assert "o_proj has groups of 64 inputs" in refusal_in_ranks(path)


def test_drawn_weights(packed: Path) -> None:
    """Weights are drawn where none are wanted from the files; the same again, and none is out of range."""
    logits = [logits_of(load_model(packed, load_format="dummy")) for _ in range(2)]
    assert torch.equal(*logits)
    assert torch.isfinite(logits[0]).all()
