"""The Triton kernels over rows against float64, under triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from baton_kernels import rows as entry
from baton_kernels.reference import reference_write_kv
from tests.support.paged_steps import Case, lay_out

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import rows

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
