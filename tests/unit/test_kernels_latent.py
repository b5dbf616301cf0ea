"""The Triton kernels of latent attention against the float64 reference, under triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from baton_kernels.reference import reference_expanded_attention, reference_latent_attention
from tests.support.latent_steps import LAYER, LatentCase, step_of
from tests.support.paged_steps import TOLERANCE

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import latent, shapes

pytestmark = pytest.mark.deep

FEW = shapes.Device(processors=3, arch=90)
CASES = {
    "decode": LatentCase(16, 576, 512, 16, (1, 17, 30)),
    "decode, 16 bits": LatentCase(16, 576, 512, 64, (2, 63, 200), dtype=torch.bfloat16),
    "one long context among short ones": LatentCase(4, 96, 64, 16, (3, 700, 1, 65)),
    "more rows than a tile": LatentCase(40, 288, 256, 32, (70, 150), dtype=torch.float16),
    "more rows than a tile, exact": LatentCase(20, 48, 32, 32, (70, 120)),
    "one head": LatentCase(1, 64, 56, 16, (7, 130), dtype=torch.bfloat16),
    "no rest": LatentCase(8, 64, 64, 16, (7, 30), ((30, 4),)),
    "seven heads": LatentCase(7, 64, 56, 8, (1, 64, 65), dtype=torch.bfloat16),
    "128 heads": LatentCase(128, 80, 64, 64, (70,), ((60, 3),), dtype=torch.bfloat16),
    "chunks": LatentCase(5, 96, 64, 16, (), ((0, 5), (31, 4), (100, 1))),
    "chunks, 16 bits": LatentCase(5, 96, 64, 16, (), ((0, 5), (300, 20), (100, 1)), torch.bfloat16),
    "mixed": LatentCase(8, 96, 80, 32, (40, 3), ((0, 5), (400, 3)), dtype=torch.bfloat16),
    "drafts": LatentCase(8, 64, 32, 16, (30, 7, 65), (), queries=3),
    "drafts, more rows than a tile": LatentCase(24, 64, 32, 64, (60, 7, 300), (), torch.float16, 3),
    "drafts beside a chunk": LatentCase(8, 64, 32, 16, (30, 7), ((30, 9),), queries=2),
    "an odd width": LatentCase(4, 40, 30, 16, (33, 9), ((3, 20),)),
}


def attend(plan: latent.CudaLatentPlan, case: LatentCase, view: Tensor, q: Tensor) -> Tensor:
    return plan.attend(view, LAYER, q, scale=case.scale, value_dim=case.value_dim)


@pytest.mark.parametrize("name", CASES)
def test_absorbed_rows(name: str) -> None:
    """Slots of nobody are NaN, and so is the block that pads tables. A second launch finds what the first has
    left."""
    torch.manual_seed(0)
    case = CASES[name]
    step = step_of(case)
    plan = latent.CudaLatentPlan.build(step.batch, step.batch, step.view, case.heads, FEW)
    expected = reference_latent_attention(
        step.view, LAYER, step.q, step.batch, scale=case.scale, value_dim=case.value_dim
    )
    out = attend(plan, case, step.view, step.q)
    assert out.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(attend(plan, case, step.view, step.q), out)


def test_rows_without_a_context_get_zeros() -> None:
    """As those have that pad a batch to the size of a captured graph."""
    case = LatentCase(4, 64, 48, 16, (5, 300, 9))
    step = step_of(case)
    step.batch.decode_contexts[1] = 0
    step.batch.decode_tables[1] = 0
    plan = latent.CudaLatentPlan.build(step.batch, step.batch, step.view, 4, FEW)
    out = attend(plan, case, step.view, step.q)
    assert torch.equal(out[1], torch.zeros(4, 48))
    assert out.isfinite().all()
    assert out[0].any()
    assert out[2].any()


def test_the_grid_and_the_workspace_depend_on_no_length() -> None:
    """Or a captured graph would hold only for the lengths it was captured with."""
    plans = []
    for contexts in ((5, 5, 5), (300, 1, 2000)):
        step = step_of(LatentCase(4, 64, 48, 16, contexts))
        plan = latent.CudaLatentPlan.build(step.batch, step.batch, step.view, 4, FEW)
        assert plan.decode is not None
        plans.append(plan.decode)
    assert plans[0].programs == plans[1].programs
    assert plans[0].starts.shape == plans[1].starts.shape


def test_chunks_that_are_expanded_are_left_out() -> None:
    torch.manual_seed(0)
    case = LatentCase(4, 64, 48, 16, (40, 3), ((0, 30), (10, 2), (70, 25)))
    step = step_of(case)
    rows = [0, 1, 32, 33]
    absorbed = replace(step.batch, chunks=(replace(step.batch.chunks[1], start=2),))
    plan = latent.CudaLatentPlan.build(step.batch, absorbed, step.view, 4, FEW)
    expected = reference_latent_attention(
        step.view, LAYER, step.q, step.batch, scale=case.scale, value_dim=48
    )
    out = attend(plan, case, step.view, step.q[rows])
    torch.testing.assert_close(out.double(), expected[rows], rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("width", [40, 64, 576])
def test_latents_go_to_their_slots_and_come_back(width: int) -> None:
    torch.manual_seed(0)
    step = step_of(LatentCase(4, width, 32, 16, (40, 3), ((10, 22),)))
    view = torch.full_like(step.view, torch.nan)
    plan = latent.CudaLatentPlan.build(step.batch, step.batch, view, 4, FEW)
    plan.store(view, LAYER, step.latents)
    own = view[step.batch.slot_blocks, 0, LAYER, 0, step.batch.slot_offsets]
    assert torch.equal(own, step.latents)
    assert int(view.isfinite().sum()) == step.latents.numel()
    (chunk,) = step.batch.chunks
    gathered = plan.gather(step.view, LAYER, chunk)
    assert gathered.shape == (32, width)
    assert torch.equal(gathered[10:], step.latents[2:])
    assert gathered.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("length", "context", "heads", "dim", "value_dim"),
    [
        (1, 1, 2, 64, 32),
        (40, 40, 3, 96, 64),
        (33, 90, 1, 192, 128),
        (5, 9, 4, 24, 20),
        (140, 200, 1, 72, 8),
    ],
)
def test_expanded_rows(
    length: int, context: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Values are a part of what is made of the latents, as in a model."""
    torch.manual_seed(0)
    step = step_of(LatentCase(heads, 64, 48, 16, (3,), (), dtype))
    plan = latent.CudaLatentPlan.build(step.batch, step.batch, step.view, heads, FEW)
    q, k = (torch.randn(tokens, heads, dim).to(dtype) for tokens in (length, context))
    v = torch.randn(context, heads, 16 + value_dim).to(dtype)[..., 16:]
    expected = reference_expanded_attention(q, k, v, scale=dim**-0.5)
    out = plan.attend_expanded(q, k, v, scale=dim**-0.5)
    assert out.shape == (length, heads, value_dim)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])
