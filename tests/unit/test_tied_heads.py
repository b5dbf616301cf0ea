"""A packed output head has the rows of the embedding that it is tied to, which exist once."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from safetensors.torch import load_file

from baton.models.decoder import Decoder
from baton.models.loader import load_model
from baton_kernels.activation_kind import SILU
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
    assert torch.equal(packed.rows(torch.arange(150)[::7]), weight[::7])
    assert torch.equal(packed.rows(indices.int()), weight[indices])
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


@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_that_nobody_reads_again_gives_its_memory_back(gated: bool) -> None:
    """16 MiB, which are more than one slab, with a panel that is not full."""
    weight, x = torch.randn(8 * 1024 + 2, 512), torch.randn(3, 512)
    kept = PackedWeight.of(weight.clone(), gated=gated, activation=SILU if gated else None)
    packed = PackedWeight.of(weight, gated=gated, activation=SILU if gated else None, is_last=True)
    assert packed is not None and kept is not None
    assert torch.equal(packed.multiply(x), kept.multiply(x))
    if sys.platform == "linux":
        left = int(weight.count_nonzero()) * weight.itemsize  # what was given back reads as zeros
        assert left <= 4 * mmap.PAGESIZE, "all but the pages that slabs begin and end within"
