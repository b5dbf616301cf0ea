"""A packed output head has the rows of the embedding that it is tied to, which exist once."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from baton.models.decoder import Decoder
from baton.models.loader import load_model
from baton_kernels.cpu.linear import PackedWeight
from tests.support.tiny_models import ModelDir


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(150, 48).to(dtype)
    packed = PackedWeight.of(weight)
    assert packed is not None
    assert packed.has_rows
    indices = torch.tensor([[0, 149, 64], [63, 64, 100]])
    assert torch.equal(packed.rows(indices), weight[indices])
    assert packed.rows(indices[:0]).shape == (0, 3, 48)
    for wrong in (-1, 150):
        with pytest.raises(IndexError, match=f"rows {wrong} to {wrong}; allowed: 0 to 149"):
            packed.rows(torch.tensor([wrong]))


def test_the_embedding_exists_once(model_dir: ModelDir) -> None:
    path = model_dir("llama-tied-mha")
    model, weight = load_model(path), load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert isinstance(model, Decoder)
    assert model.embed_tokens is not None
    assert model.embed_tokens.weight is None
    assert torch.equal(model.embed(torch.arange(len(weight))), weight)


def test_a_rounded_head_leaves_the_embedding_as_it_is(model_dir: ModelDir) -> None:
    path = model_dir("llama-tied-mha")
    model, weight = load_model(path, quantization="int8"), load_file(path / "model.safetensors")
    assert torch.equal(model.embed(torch.arange(4)), weight["model.embed_tokens.weight"][:4])
