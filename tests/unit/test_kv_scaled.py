"""A pool of FP8 with scales by block and head: what is stored, and attention over it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels.attention import AttentionPlan, paged_attention, rotate_and_store, write_kv
from baton_kernels.blocks import copy_blocks
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.kv_fp8 import FP8
from baton_kernels.kv_layout import KVLayout, TokenKV
from baton_kernels.kv_scaled import has_scales, least_scales, scaled_view, scales_of, store_scaled
from baton_kernels.paged import PagedBatch
from baton_kernels.reference import reference_attention
from tests.support.paged_steps import Case, lay_out, sinks_of

CASES = {
    "decode, groups of one and of three": Case(6, 2, 64, 16, None, (1, 16, 17, 70, 1100), ()),
    "mixed, window": Case(8, 2, 64, 16, 20, (1, 19, 90), ((0, 50), (33, 40)), torch.bfloat16),
    "soft-cap, sinks": Case(4, 4, 128, 32, None, (51, 500), ((0, 70),), softcap=5.0, has_sinks=True),
    "drafts": Case(8, 2, 96, 16, None, (60, 7, 700), ((560, 70),), torch.bfloat16, queries=3),
}


def pool_like(pool: Tensor) -> tuple[Tensor, Tensor]:
    """An empty pool for the blocks of ``pool``: its pages, and its blocks."""
    blocks, heads, layers, vectors, size, dim = pool.shape
    pages = torch.zeros(blocks, heads * layers * vectors * (size * dim + 4), dtype=torch.uint8).view(FP8)
    return pages, scaled_view(pages, tuple(pool.shape))


def dequantized(pool: Tensor) -> Tensor:
    return pool.double() * scales_of(pool)[..., None, None].double()


def planned(batch: PagedBatch, pool: Tensor) -> AttentionPlan:
    plan = CpuPlan.build(batch, pool)
    assert plan is not None
    return AttentionPlan(plan)


def filled(pool: Tensor) -> Tensor:
    """All tokens of all blocks of a pool, of sizes that differ by token and head, by ``store_scaled``."""
    blocks, heads, layers, _, size, dim = pool.shape
    _, view = pool_like(pool)
    for layer in range(layers):
        k, v = (
            torch.randn(blocks * size, heads, dim) * torch.exp(4 * torch.randn(blocks * size, heads, 1))
            for _ in range(2)
        )
        at = torch.arange(blocks).repeat_interleave(size)
        store_scaled(view, layer, k, v, at, torch.arange(size).repeat(blocks))
    return view


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_over_dequantized_kv(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    plain, batch = lay_out(replace(case, dtype=torch.float32))
    pool, layer = filled(plain), 1
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim).to(case.dtype)
    how = {"scale": 0.1 * case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    how |= {"sinks": sinks_of(case)}
    out = paged_attention(pool, layer, q, planned(batch, pool), **how)
    exact = dequantized(pool)
    expected = reference_attention(exact, layer, q, batch, **how)
    own = torch.ones(len(q), dtype=torch.bool)
    own[: batch.num_decode] = batch.decode_contexts > 0
    share = 2e-5 if case.dtype == torch.float32 else 1e-2
    largest = exact[:, :, layer, 1].abs().max().item()
    torch.testing.assert_close(out[own].double(), expected[own], rtol=share, atol=share * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_store_what_plain_torch_does_however_the_tokens_come(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = Case(6, 2, 64, 16, None, (), ((0, 70),), dtype)
    plain, batch = lay_out(case)
    pages, pool = pool_like(plain)
    again_pages, again = pool_like(plain)
    k, v = (torch.randn(70, 2, 64) * torch.exp(3 * torch.randn(70, 2, 1)) for _ in range(2))
    k[3], v[20, :, 5] = 0, 1e30
    k, v = k.to(dtype), v.to(dtype)
    write_kv(pool, 1, k, v, planned(batch, pool))
    qkv = torch.cat((torch.zeros(70, 6, 64, dtype=dtype), k, v), dim=1)
    ones, zeros = torch.ones(70, 1, 64), torch.zeros(70, 1, 64)
    rotate_and_store(again, 1, qkv, planned(batch, again), cos=ones, sin=zeros)
    assert torch.equal(pages.view(torch.uint8), again_pages.view(torch.uint8))
    bytewise = again_pages.clone()
    again_pages.view(torch.uint8).zero_()
    for token in range(70):
        slots = batch.slot_blocks[token : token + 1], batch.slot_offsets[token : token + 1]
        store_scaled(again, 1, k[token : token + 1], v[token : token + 1], *slots)
    assert torch.equal(bytewise.view(torch.uint8), again_pages.view(torch.uint8))
    stored = dequantized(pool)[batch.slot_blocks, :, 1, :, batch.slot_offsets]
    exact = torch.stack((k, v), dim=2).double()
    smallest = scales_of(pool)[batch.slot_blocks, :, 1].double()[..., None] * 2.0**-9
    assert ((stored - exact).abs() <= exact.abs() / 16 + smallest).all()


def test_a_scale_is_the_least_power_of_two() -> None:
    x = torch.tensor([[448.0], [449.0], [0.0], [1e-3], [-3.5], [1e-38], [float("inf")], [float("nan")]])
    assert least_scales(x).log2().tolist() == [0, 1, -9, -18, -7, -100, 120, -9]


def test_a_block_that_is_taken_anew_forgets_its_scales() -> None:
    case = Case(2, 2, 64, 16, None, (), ((0, 5),))
    plain, batch = lay_out(case)
    _, pool = pool_like(plain)
    plan = planned(batch, pool)
    large, small = torch.full((5, 2, 64), 1e4), torch.full((5, 2, 64), 1e-4)
    write_kv(pool, 0, large, large, plan)
    write_kv(pool, 0, small, large, plan)
    at = batch.slot_blocks[0]
    assert torch.equal(scales_of(pool)[at, :, 0].log2(), torch.tensor([[-22.0, 5.0]] * 2))


def test_scales_are_copied_with_their_block() -> None:
    torch.manual_seed(0)
    view = filled(torch.zeros(3, 2, 1, 2, 16, 64))
    pages = torch.as_strided(view, (3, view.stride(0)), (view.stride(0), 1))
    assert has_scales(view)
    copy_blocks(pages, torch.tensor([2]), pages, torch.tensor([0]))
    assert torch.equal(dequantized(view)[2], dequantized(view)[0])


@pytest.mark.parametrize("dim", [64, 128])
def test_blocks_take_half_the_bytes(dim: int) -> None:
    kept = [[TokenKV(8, 2, dim)]] * 4
    scaled, exact = KVLayout.of(kept, 16, 1, None, 4), KVLayout.of(kept, 16, 2)
    assert scaled.page_bytes <= 0.52 * exact.page_bytes
    assert not scaled.is_plain
    assert not scaled.has_layer_scales
