"""The Triton kernels of norms and activations on a device, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.norm import Norm
from baton_kernels.reference import reference_activated, reference_gated, reference_norm
from baton_kernels.rotary import WholeNorm
from tests.support.paged_steps import TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
close = partial(torch.testing.assert_close, check_dtype=False, check_device=False)


def norm_of(size: int, dtype: torch.dtype, *, centered: bool) -> Norm:
    weight, bias = torch.randn(2, size, device=CUDA).to(dtype)
    return Norm(weight, 1e-5, 1.0, centered, bias if centered else None)


@DTYPES
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("size", [64, 2880, 5120])
def test_norms(size: int, centered: bool, dtype: torch.dtype) -> None:
    from baton_kernels.cuda import rows

    torch.manual_seed(0)
    tolerance = TOLERANCE[dtype]
    x, residual = torch.randn(33, size, device=CUDA).to(dtype), torch.randn(33, size, device=CUDA)
    post, norm = (norm_of(size, dtype, centered=centered) for _ in range(2))
    expected = residual.double() + 0.5 * reference_norm(x, post)
    out = rows.add_norm(x, residual, norm, dtype, post=post, factor=0.5)
    close(residual, expected.float(), rtol=1e-5, atol=1e-5)
    close(out.double(), reference_norm(expected, norm), rtol=tolerance, atol=tolerance)
    alone = rows.add_norm(None, residual, replace(norm, offset=0.0), dtype)
    plain = reference_norm(residual, replace(norm, offset=0.0))
    close(alone.double(), plain, rtol=tolerance, atol=tolerance)
    assert torch.equal(rows.add_norm(None, residual, None, dtype), residual.to(dtype))


@DTYPES
@pytest.mark.parametrize("ranks", [1, 4])
def test_norms_of_all_heads(ranks: int, dtype: torch.dtype) -> None:
    from baton_kernels.cuda import whole_norm

    torch.manual_seed(0)
    qkv = torch.randn(ranks, 33, 5120 + 2 * 1024, device=CUDA).to(dtype)
    q, k = (torch.randn(ranks, size, device=CUDA).to(dtype) for size in (5120, 1024))
    expected = qkv.double()
    for columns, weight in ((slice(0, 5120), q), (slice(5120, 6144), k)):
        part = expected[:, :, columns]
        mean = part.square().mean((0, 2))[:, None]
        expected[:, :, columns] = part / (mean + 1e-5).sqrt() * weight[:, None].double()
    held = list(zip(qkv, (WholeNorm(*each, 1e-5) for each in zip(q, k, strict=True)), strict=True))
    alone = qkv[0].clone()
    squares = torch.stack([whole_norm.squares_of_heads(*of_rank) for of_rank in held]).sum(0)
    for part, norm in held:
        whole_norm.scale_heads(part, squares, norm, (q.numel(), k.numel()))
    close(qkv.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if ranks == 1:
        whole_norm.norm_heads(alone, held[0][1])
        close(alone.double(), expected[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, Activation("clamped_swiglu", 7.0)], ids=str)
def test_activations(activation: Activation, dtype: torch.dtype) -> None:
    from baton_kernels.cuda import rows

    torch.manual_seed(0)
    gate_up: Tensor = (10 * torch.randn(33, 8192, device=CUDA)).to(dtype)
    tolerance = TOLERANCE[dtype]
    expected = reference_gated(gate_up[:, :4096], gate_up[:, 4096:], activation)
    close(rows.gated_product(gate_up, activation).double(), expected, rtol=tolerance, atol=tolerance)
    if activation.kind != "clamped_swiglu":
        expected = reference_activated(gate_up, activation)
        close(rows.activated(gate_up, activation).double(), expected, rtol=tolerance, atol=tolerance)
