"""The Triton kernels over rows against float64, under triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from baton_kernels import rows as entry
from baton_kernels.attention import AttentionPlan, rotate_and_store
from baton_kernels.reference import reference_turned, reference_write_kv
from baton_kernels.rotary import HeadNorm
from tests.support.paged_steps import Case, lay_out

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import rotary, rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 96])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    pool, batch = lay_out(Case(4, 2, head_dim, 16, None, (40, 3, 129), ((0, 5), (31, 64)), dtype))
    fused = torch.randn(batch.positions.numel(), 8, head_dim).to(dtype)
    k, v = fused[:, 4:6], fused[:, 6:]
    expected = pool.clone()
    reference_write_kv(expected, 1, k, v, batch)
    rows.write_kv(pool, 1, k, v, batch)
    assert torch.equal(pool, expected)


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (9, 1, 96), (2, 2, 20)])
def test_heads_are_normed_rotated_and_stored(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    case = Case(heads, kv_heads, head_dim, 16, None, (40, 3, 129), ((0, 5), (31, 20)), dtype)
    pool, batch = lay_out(case)
    tokens = batch.positions.numel()
    qkv = torch.randn(tokens, heads + 2 * kv_heads + 1, head_dim).to(dtype)[:, :-1]
    cos, sin = torch.randn(2, tokens, 1, head_dim)
    norm = None
    if normed:
        norm = HeadNorm(torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-5)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    expected_q = reference_turned(q, cos, sin, norm.q if norm else None, 1e-5)
    expected_k = reference_turned(k, cos, sin, norm.k if norm else None, 1e-5)
    expected = pool.double()
    reference_write_kv(expected, 1, expected_k, v.double(), batch)

    plan = AttentionPlan.build(batch, pool, {None}, heads)
    by_torch = pool.clone()
    out = rotate_and_store(by_torch, 1, qkv, plan, cos=cos, sin=sin, norm=norm)
    by_triton = pool.clone()
    for name, turned, stored in (
        ("torch", out, by_torch),
        ("triton", rotary.rotate_and_store(by_triton, 1, qkv, cos, sin, norm, batch), by_triton),
    ):
        assert turned.dtype == dtype, name
        # torch rounds what is normed before it is rotated.
        tolerance = TOLERANCE[dtype] * (4 if name == "torch" else 1)
        for found, exact in ((turned, expected_q), (stored, expected)):
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    # Values are not touched, nor is any slot but the step's.
    same = expected == pool.double()
    assert torch.equal(by_triton[same], pool[same])
    assert torch.equal(by_triton[:, :, :, 1], by_torch[:, :, :, 1])


def test_heads_that_do_not_fit_are_refused() -> None:
    pool, batch = lay_out(Case(4, 2, 64, 16, None, (3,), ()))
    qkv, angles = torch.zeros(1, 8, 64), torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="heads of 32: allowed is an even size, and the pool's, 64"):
        rotary.rotate_and_store(pool, 0, qkv[..., :32], angles, angles, None, batch)
    with pytest.raises(ValueError, match=r"cos is .* torch.float64; allowed: .* float32"):
        rotary.rotate_and_store(pool, 0, qkv, angles.double(), angles, None, batch)


@DTYPES
@pytest.mark.parametrize("size", [64, 1000])
def test_add_rms_norm(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, size).to(dtype), torch.randn(size).to(dtype)
    residual = torch.randn(7, size)
    added = x.double() + residual.double()
    expected = added / (added.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for function in (rows.add_rms_norm, entry.add_rms_norm):
        kept = residual.clone()
        out = function(x, kept, weight, 1e-5)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(kept.double(), added, rtol=0, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("size", [64, 1500])
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    gate_up = (10 * torch.randn(5, 2 * size)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    for function in (rows.silu_mul, entry.silu_mul):
        out = function(gate_up)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
