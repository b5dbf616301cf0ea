"""The Triton kernels on a device, against the float64 reference."""

from __future__ import annotations

import random

import pytest
import torch

from baton_kernels import rows
from baton_kernels.attention import AttentionPlan, paged_attention, write_kv
from baton_kernels.reference import reference_attention, reference_write_kv
from tests.support.paged_steps import TOLERANCE, Case, lay_out, moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 4, 8])
    return Case(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 5, 8, 16]),
        kv_heads=kv_heads,
        head_dim=rng.choice([64, 96, 128, 256]),
        block_size=rng.choice([16, 32, 64]),
        window=rng.choice([None, rng.randint(1, 2000)]),
        decode=tuple(rng.randint(1, 4000) for _ in range(rng.choice([0, 1, 5, 60]))),
        chunks=tuple((rng.choice([0, rng.randint(0, 3000)]), rng.randint(1, 300)) for _ in range(3)),
        dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
        softcap=rng.choice([None, None, 0.5, 20.0]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_attention(seed: int) -> None:
    torch.manual_seed(seed)
    case = random_case(seed)
    pool, batch = moved(*lay_out(case), CUDA)
    tokens = batch.positions.numel()
    fused = torch.randn(tokens, case.heads + 2 * case.kv_heads, case.head_dim, device=CUDA).to(case.dtype)
    q, k, v = torch.split(fused, [case.heads, case.kv_heads, case.kv_heads], dim=1)
    plan = AttentionPlan.build(batch, pool, {case.window})
    expected_pool = pool.clone()
    reference_write_kv(expected_pool, 1, k, v, batch)
    write_kv(pool, 1, k, v, plan)
    assert torch.equal(pool, expected_pool)
    how = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    out = paged_attention(pool, 1, q, plan, **how)
    expected = reference_attention(pool, 1, q, batch, **how)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.dtype])


def test_a_captured_decode_step_serves_other_lengths() -> None:
    torch.manual_seed(0)
    case = Case(8, 2, 128, 64, None, (3000, 17, 1, 900), (), torch.bfloat16)
    pool, batch = moved(*lay_out(case), CUDA)
    q = torch.randn(4, 8, 128, device=CUDA).bfloat16()

    def step() -> torch.Tensor:
        plan = AttentionPlan.build(batch, pool, {None})
        return paged_attention(pool, 1, q, plan, scale=0.1, window=None)

    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for contexts in ((3000, 17, 1, 900), (1, 16, 1, 899), (2999, 1, 1, 1)):
        batch.decode_contexts.copy_(torch.tensor(contexts))
        graph.replay()
        expected = reference_attention(pool, 1, q, batch, scale=0.1, window=None)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate_up = torch.randn(33, 4096).to(dtype), torch.randn(33, 8192).to(dtype)
    weight, residual = torch.randn(4096).to(dtype), torch.randn(33, 4096)
    kept = residual.to(CUDA)
    normed = rows.add_rms_norm(x.to(CUDA), kept, weight.to(CUDA), 1e-5).cpu()
    activated = rows.silu_mul(gate_up.to(CUDA)).cpu()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(activated, rows.silu_mul(gate_up), **tolerance)
    torch.testing.assert_close(normed, rows.add_rms_norm(x, residual, weight, 1e-5), **tolerance)
    torch.testing.assert_close(kept.cpu(), residual)
