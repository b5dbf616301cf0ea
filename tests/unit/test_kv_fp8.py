"""A pool of FP8 on a CPU: what is stored, and attention over it against the reference over dequantized KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels.attention import AttentionPlan, new_pool, paged_attention, rotate_and_store, write_kv
from baton_kernels.blocks import copy_blocks
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.kv_fp8 import FP8, UNSCALED, KVScales
from baton_kernels.paged import PagedBatch
from baton_kernels.plain import PlainPlan
from baton_kernels.reference import reference_attention
from baton_kernels.rotary import HeadNorm
from baton_kernels.window import ChunkedWindow
from tests.support.fp8_steps import ALL_CODES, dequantized, encoded
from tests.support.paged_steps import Case, lay_out, sinks_of

SCALES = KVScales(0.25, 1.7)
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "decode, groups of one and of three": Case(6, 2, 64, 16, None, (1, 16, 17, 70, 1100), ()),
        "one head to one": Case(2, 2, 128, 32, None, (40, 600), ((0, 5), (31, 64)), torch.bfloat16),
        "mixed, window": Case(8, 2, 64, 16, 20, (1, 19, 90), ((0, 50), (33, 40)), torch.bfloat16),
        "chunked window, soft-cap, sinks": Case(
            4, 2, 64, 16, ChunkedWindow(23), (51, 500), ((0, 70),), softcap=5.0, has_sinks=True
        ),
        "drafts": Case(8, 2, 96, 16, None, (60, 7, 700), ((560, 70),), torch.bfloat16, queries=3),
        "long": Case(16, 2, 256, 16, None, (1100,), ((511, 30),), torch.bfloat16),
    }
)
PLANNERS = ("plain", "native")


def plan_of(planner: str, batch: PagedBatch, pool: Tensor, case: Case) -> AttentionPlan:
    if planner == "plain":
        return AttentionPlan(PlainPlan.build(batch, pool, {case.window}))
    plan = CpuPlan.build(batch, pool)
    assert plan is not None
    return AttentionPlan(plan)


def tolerance(dtype: torch.dtype) -> float:
    """The rounding of the output, and in bfloat16 that of the weights."""
    return 2e-5 if dtype == torch.float32 else 2e-2


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_over_dequantized_kv(name: str, planner: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    pool, batch = lay_out(replace(case, dtype=torch.float32))
    codes = encoded(pool, UNSCALED)
    layer = 1
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim).to(case.dtype)
    how: dict[str, Any] = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    how["sinks"] = sinks_of(case)
    out = paged_attention(codes, layer, q, plan_of(planner, batch, codes, case), **how, scales=SCALES)
    expected = reference_attention(dequantized(codes, SCALES), layer, q, batch, **how)
    own = torch.ones(len(q), dtype=torch.bool)
    own[: batch.num_decode] = batch.decode_contexts > 0
    assert out.dtype == case.dtype
    torch.testing.assert_close(out[own].double(), expected[own], rtol=0, atol=tolerance(case.dtype))


def every_number(dtype: torch.dtype) -> tuple[Tensor, Tensor, PagedBatch]:
    """An empty pool, keys that lie at, between and beyond all codes, and the step that stores them."""
    codes = ALL_CODES.float()
    between = (codes[:-1] + codes[1:]) / 2
    near = torch.cat((codes, between, between * 1.01, between * 0.99, torch.tensor([464.0, 465.0, 1e6])))
    numbers = torch.cat((near, -near)).to(dtype)
    k = torch.zeros(-(-len(numbers) // 64), 1, 64, dtype=dtype)
    k.view(-1)[: len(numbers)] = numbers
    pool, batch = lay_out(Case(1, 1, 64, 16, None, (), ((0, len(k)),), dtype), layers=1)
    return new_pool(*(pool.shape[i] for i in (0, 1, 2, 4, 5)), dtype=FP8, device=pool.device), k, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("planner", PLANNERS)
def test_each_number_becomes_the_nearest_code(dtype: torch.dtype, planner: str) -> None:
    pool, k, batch = every_number(dtype)
    case = Case(1, 1, 64, 16, None, (), (), dtype)
    plan = plan_of(planner, batch, pool, case)
    qkv = torch.cat((k, k, 2 * k), dim=1)
    angles = torch.ones(len(k), 1, 64), torch.zeros(len(k), 1, 64)
    rotate_and_store(pool, 0, qkv, plan, cos=angles[0], sin=angles[1], scales=KVScales(1.0, 2.0))
    stored = pool.float()[batch.slot_blocks, 0, 0, :, batch.slot_offsets]
    nearest = k[:, 0].float().clamp(-448, 448).to(FP8).float()
    assert torch.equal(stored, torch.stack((nearest, nearest), dim=1))
    again = torch.zeros_like(pool)
    write_kv(again, 0, k, 2 * k, plan, KVScales(1.0, 2.0))
    assert torch.equal(again.float(), pool.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_store_what_plain_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = Case(6, 2, 64, 16, None, (5, 40), ((3, 30),), dtype)
    _, batch = lay_out(case)
    tokens = batch.positions.numel()
    qkv = (3 * torch.randn(tokens, 10, 64)).to(dtype)
    angles = torch.randn(tokens, 1, 32)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    norm = HeadNorm(torch.rand(64).to(dtype), torch.rand(64).to(dtype), 1e-5)
    shape = lay_out(case)[0].shape
    pools = [torch.zeros(shape, dtype=FP8) for _ in PLANNERS]
    queries = [
        rotate_and_store(
            pool, 2, qkv, plan_of(name, batch, pool, case), cos=cos, sin=sin, norm=norm, scales=SCALES
        )
        for name, pool in zip(PLANNERS, pools, strict=True)
    ]
    torch.testing.assert_close(queries[0], queries[1], rtol=0, atol=tolerance(dtype))
    plain, native = (pool.float() for pool in pools)
    assert (plain != native).float().mean() < 2e-3  # where a rounding before it went the other way
    torch.testing.assert_close(plain, native, rtol=0.13, atol=tolerance(dtype))


def test_blocks_are_copied_as_they_are() -> None:
    pool = torch.arange(4 * 8, dtype=torch.uint8).view(4, 8).view(FP8)
    copy_blocks(pool, torch.tensor([3]), pool, torch.tensor([1]))
    assert pool.view(torch.uint8)[3].tolist() == list(range(8, 16))


def test_scales_are_of_pools_of_fp8_alone() -> None:
    pool, batch = lay_out(Case(2, 1, 64, 16, None, (5,), ()))
    plan = AttentionPlan.build(batch, pool, {None}, 2)
    with pytest.raises(ValueError, match=r"scales are KVScales\(k=2.0, v=1.0\); allowed with a pool"):
        write_kv(pool, 0, torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), plan, KVScales(2.0))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_divides_nothing_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"k_scale is .*; allowed: finite and above 0"):
        KVScales(scale)
