"""Attention over latents against the float64 reference: the CPU's kernels and plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.models.rope import cos_and_signed_sin
from baton_kernels.cpu.latent import CpuLatentPlan
from baton_kernels.cpu.library import native
from baton_kernels.latent import LatentPlan
from baton_kernels.latent_norms import LatentNorms
from baton_kernels.norm import Norm
from baton_kernels.paged import PagedBatch
from baton_kernels.plain_latent import PlainLatentPlan
from baton_kernels.reference import (
    reference_expanded_attention,
    reference_latent_attention,
    reference_norm,
    reference_turned,
)
from tests.support.latent_steps import LAYER, LatentCase, step_of
from tests.support.threads import in_threads

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
LONG = (1, 64, 65, 511, 512, 513, 2100)
CASES = {
    "decode": LatentCase(16, 576, 512, 16, (1, 16, 17, 70, 64)),
    "decode, long": LatentCase(4, 96, 64, 16, LONG),
    "decode, bfloat16": LatentCase(16, 576, 512, 16, (1, 2, 63, 700), dtype=torch.bfloat16),
    "one head": LatentCase(1, 64, 56, 16, (7, 130)),
    "odd heads, bfloat16": LatentCase(7, 64, 56, 8, LONG, dtype=torch.bfloat16),
    "many heads": LatentCase(40, 288, 256, 16, (70,)),
    "many heads, bfloat16": LatentCase(128, 576, 512, 64, (70,), dtype=torch.bfloat16),
    "chunks": LatentCase(5, 96, 64, 16, (), ((0, 5), (31, 40), (100, 1))),
    "mixed": LatentCase(8, 96, 80, 32, (40, 3), ((0, 5), (600, 3)), dtype=torch.bfloat16),
    "drafts": LatentCase(8, 64, 32, 16, (60, 7, 700), (), queries=3),
    "drafts beside a chunk": LatentCase(8, 64, 32, 16, (60, 7), ((30, 9),), queries=2),
    "an odd width": LatentCase(4, 40, 30, 16, (33, 9), ((3, 20),)),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_absorbed_rows(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of nobody are NaN, and so is the block that pads tables."""
    torch.manual_seed(0)
    case = CASES[name]
    step = step_of(case)
    if plain:
        monkeypatch.setattr(CpuLatentPlan, "build", lambda *_: None)
    plan = LatentPlan.build(step.batch, step.view, case.heads)
    by_kernels = not plain and case.width % 32 == 0 and native() is not None
    assert isinstance(plan.step, CpuLatentPlan if by_kernels else PlainLatentPlan)
    assert plan.rows is None
    expected = reference_latent_attention(
        step.view, LAYER, step.q, step.batch, scale=case.scale, value_dim=case.value_dim
    )
    got = plan.attend(step.view, LAYER, step.q, scale=case.scale, value_dim=case.value_dim)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_row_is_the_same_whatever_is_beside_it_and_however_many_threads() -> None:
    torch.manual_seed(0)
    case = LatentCase(12, 96, 64, 16, (1300, 40, 600), ((9, 6),), torch.bfloat16)
    step = step_of(case)

    def attended() -> Tensor:
        plan = LatentPlan.build(step.batch, step.view, case.heads)
        return plan.attend(step.view, LAYER, step.q, scale=case.scale, value_dim=64)

    together = attended()
    with in_threads(3):
        assert torch.equal(attended(), together)
    batch = step.batch
    for row in range(batch.num_decode):
        own = slice(row, row + 1)
        slots = batch.positions[own], batch.slot_blocks[own], batch.slot_offsets[own]
        alone = PagedBatch(*slots, 1, batch.decode_tables[own], batch.decode_contexts[own], ())
        plan = LatentPlan.build(alone, step.view, 12)
        got = plan.attend(step.view, LAYER, step.q[own], scale=case.scale, value_dim=64)
        assert torch.equal(got[0], together[row])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks_that_are_expanded_are_left_out(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = LatentCase(4, 64, 48, 16, (40, 3), ((0, 30), (10, 2), (70, 25)), dtype)
    step = step_of(case)
    plan = LatentPlan.build(step.batch, step.view, 4, lambda chunk: chunk.length > 20)
    assert plan.expanded == (step.batch.chunks[0], step.batch.chunks[2])
    assert plan.rows is not None
    assert plan.rows.tolist() == [0, 1, 32, 33]
    expected = reference_latent_attention(
        step.view, LAYER, step.q, step.batch, scale=case.scale, value_dim=48
    )
    got = plan.attend(step.view, LAYER, step.q[plan.rows], scale=case.scale, value_dim=48)
    torch.testing.assert_close(
        got.double(), expected[plan.rows], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_latents_go_to_their_slots_and_come_back() -> None:
    torch.manual_seed(0)
    case = LatentCase(4, 64, 48, 16, (40, 3), ((10, 22),))
    step = step_of(case)
    view = torch.full_like(step.view, torch.nan)
    plan = LatentPlan.build(step.batch, view, 4)
    plan.store(view, LAYER, step.latents)
    own = view[step.batch.slot_blocks, 0, LAYER, 0, step.batch.slot_offsets]
    assert torch.equal(own, step.latents)
    assert int(view.isfinite().sum()) == step.latents.numel()
    (chunk,) = step.batch.chunks
    gathered = LatentPlan.build(step.batch, step.view, 4).gather(step.view, LAYER, chunk)
    assert gathered.shape == (32, 64)
    assert torch.equal(gathered[10:], step.latents[2:])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("length", "context", "heads", "dim", "value_dim"),
    [(1, 1, 2, 64, 32), (40, 40, 3, 96, 64), (33, 150, 2, 192, 128), (5, 9, 4, 24, 20), (7, 300, 2, 64, 64)],
)
def test_expanded_rows(
    length: int, context: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    step = step_of(LatentCase(heads, 64, 48, 16, (), ((context - length, length),), dtype))
    plan = LatentPlan.build(step.batch, step.view, heads)
    shapes = (length, heads, dim), (context, heads, dim), (context, heads, value_dim)
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    expected = reference_expanded_attention(q, k, v, scale=dim**-0.5)
    got = plan.attend_expanded(q, k, v, scale=dim**-0.5)
    assert got.shape == (length, heads, value_dim)
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


ROUNDED = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SIZES = {
    "DeepSeek": (24, 128, 64, 128, 512),
    "odd sizes": (0, 15, 8, 20, 56),
    "small": (40, 70, 32, 66, 96),
}
"""(q_rank, nope_dim, rope_dim, value_dim, kv_rank)."""


def turns_of(positions: Tensor, rope_dim: int) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] / 100.0 ** (torch.arange(rope_dim // 2) / rope_dim)
    cos, sin = cos_and_signed_sin(angles)
    return cos[:, None], sin[:, None]


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("name", SIZES)
def test_latents_are_normed_and_turned_into_their_slots(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q_rank, _, rope_dim, _, kv_rank = SIZES[name]
    step = step_of(LatentCase(1, kv_rank + rope_dim, kv_rank, 16, (40, 3), ((10, 22),), dtype))
    cos, sin = turns_of(step.batch.positions, rope_dim)
    down = torch.randn(len(cos), q_rank + kv_rank + rope_dim).to(dtype)
    kv = Norm(torch.rand(kv_rank).to(dtype), 1e-6)
    norms = LatentNorms(Norm(torch.rand(q_rank).to(dtype), 1e-6) if q_rank else None, kv)
    view = torch.full_like(step.view, torch.nan)
    q = LatentPlan.build(step.batch, view, 1).store_normed(view, LAYER, down, norms, cos, sin)
    latent, key = down[:, q_rank : q_rank + kv_rank], down[:, q_rank + kv_rank :]
    turned = reference_turned(key[:, None], cos, sin, None, 0)[:, 0]
    expected = torch.cat((reference_norm(latent, kv), turned), dim=-1)
    own = view[step.batch.slot_blocks, 0, LAYER, 0, step.batch.slot_offsets]
    torch.testing.assert_close(own.double(), expected, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
    assert int(view.isfinite().sum()) == own.numel()
    assert q.shape == (len(down), q_rank)
    if norms.q is not None:
        wanted = reference_norm(down[:, :q_rank], norms.q)
        torch.testing.assert_close(q.double(), wanted, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("rows", [1, 4, 9, 70])
@pytest.mark.parametrize("name", SIZES)
def test_queries_are_absorbed_and_values_made(name: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, nope_dim, rope_dim, value_dim, kv_rank = SIZES[name]
    heads, step = 3, step_of(LatentCase(3, kv_rank + rope_dim, kv_rank, 16, (3,), (), dtype))
    plan = LatentPlan.build(step.batch, step.view, heads)
    up = (torch.randn(heads, nope_dim + value_dim, kv_rank) / kv_rank**0.5).to(dtype)
    q = (torch.randn(rows, heads, nope_dim + rope_dim) / nope_dim**0.5).to(dtype)
    cos, sin = turns_of(torch.arange(rows), rope_dim)
    for factors in (None, 1 + torch.rand(rows, 1, 1)):
        nope = torch.einsum("rhn,hnl->rhl", q[..., :nope_dim].double(), up[:, :nope_dim].double())
        turned = reference_turned(q[..., nope_dim:], cos, sin, None, 0)
        expected = torch.cat((nope, turned), dim=-1) * (1 if factors is None else factors.double())
        got = plan.absorb(q, up, cos, sin, factors)
        torch.testing.assert_close(got.double(), expected, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
    sums = torch.randn(rows, heads, kv_rank).to(dtype)
    values = torch.einsum("rhl,hvl->rhv", sums.double(), up[:, nope_dim:].double())
    got = plan.make_values(sums, up, value_dim)
    torch.testing.assert_close(got.double(), values, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])
