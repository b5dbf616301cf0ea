"""Attention over latents against the float64 reference: the CPU's kernels and plain torch."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.cpu.latent import CpuLatentPlan
from baton_kernels.cpu.library import native
from baton_kernels.latent import LatentPlan
from baton_kernels.paged import PagedBatch
from baton_kernels.plain_latent import PlainLatentPlan
from baton_kernels.reference import reference_expanded_attention, reference_latent_attention
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

    def attended() -> torch.Tensor:
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
