"""The Triton kernels of layers that keep a state against float64, under triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from baton_kernels.causal_conv import ConvWeights
from baton_kernels.mamba import gated_squares
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.mamba_weights import GatedNorm
from baton_kernels.reference import reference_gated_norm
from tests.support.covering import Choice, covering
from tests.support.delta_cases import delta_layer, layer_inputs
from tests.support.state_steps import (
    DELTAS,
    MAMBAS,
    DeltaCase,
    MambaCase,
    StateStep,
    conv_reference,
    delta_reference,
    delta_step,
    mamba_weights,
    shares,
)

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import causal_conv, delta_rule, mamba

pytestmark = pytest.mark.deep

CHUNKS = ([3, 18, 1], [17, 2])
"""Segments shorter than a convolution, and longer than a piece."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("choice", covering(DELTAS)[:4], ids=lambda choice: str(choice["kind"]))
def test_linear_attention(choice: Choice) -> None:
    torch.manual_seed(0)
    case = DeltaCase.of(choice)
    expected = case.expected()
    out = delta_rule.linear_attention(case.layer, case.inputs, case.step.states, case.step.rows)
    assert out.dtype == choice["dtype"]
    tolerance = TOLERANCE[out.dtype]
    out_share, state_share = shares((out, case.step.states.pages), expected, tolerance)
    assert out_share <= 1
    assert state_share * tolerance <= 1e-4


def test_alike_keys_and_decays_that_forget_everything() -> None:
    """Products of powers of the triangular system would have no digit left, and quotients of decays none."""
    torch.manual_seed(1)
    layer = replace(delta_layer(1, 1, 16, 16, taps=0), a_log=torch.zeros(1))
    step = delta_step(layer, [[40]], 1)
    inputs = layer_inputs(layer, step.length, torch.float32, by_channel=False, corrects=True)
    qkv = torch.randn(1, 48).expand(step.length, -1) + 1e-3 * torch.randn(step.length, 48)
    decay = torch.full((step.length, 1), -9.0)
    decay[::20] = 200.0
    inputs = replace(
        inputs, qkv=qkv, decay=decay, beta=torch.full((step.length, 1), 9.0), gate=torch.ones(step.length, 16)
    )
    expected = step.expected(delta_reference(layer, inputs))
    for dtype in (torch.float32, torch.float64):  # exact products and others have pieces of their own
        own = replace(inputs, qkv=qkv.to(dtype))
        states = replace(step.states, pages=step.states.pages.clone())
        out = delta_rule.linear_attention(layer, own, states, step.rows)
        assert max(shares((out, states.pages), expected, 1e-4)) <= 1


@pytest.mark.parametrize("choice", covering(MAMBAS)[:2], ids=lambda choice: f"{choice['units']} units")
def test_mamba(choice: Choice) -> None:
    torch.manual_seed(0)
    case = MambaCase.of(choice)
    expected = case.expected()
    out = mamba.mamba(case.projected, case.weights, case.sizes, case.step.states, case.step.rows)
    assert max(shares((out, case.step.states.pages), expected, 1e-4)) <= 1


@pytest.mark.parametrize(
    ("channels", "kernel", "units", "queries"), [(64, 3, 2, 1), (30, 4, 3, 3), (9, 2, 1, 2)]
)
def test_short_convolutions(channels: int, kernel: int, units: int, queries: int) -> None:
    torch.manual_seed(0)
    conv = ConvWeights(torch.randn(kernel, channels), torch.randn(channels) if queries > 1 else None)
    step = StateStep.of(units, channels // units * (kernel - 1), CHUNKS, queries)
    projected = torch.randn(step.length, 3 * channels)
    expected = step.expected(conv_reference(projected, conv, units))
    out = causal_conv.short_conv(projected, *(conv.weight, conv.bias), step.states, step.rows.described)
    assert max(shares((out, step.states.pages), expected, 1e-5)) <= 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("size", "groups"), [(64, 2), (27, 3)])
def test_gated_norms(size: int, groups: int, gate_first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, gate, weight = torch.randn(5, size), torch.randn(5, 2 * size)[:, size:], torch.randn(size)
    expected = reference_gated_norm(y, gate, weight, 1e-5, groups, gate_first)
    norm = GatedNorm(weight, 1e-5, groups, size // groups, gate_first)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    squares = gated_squares(y, gate, norm)
    for given in (None, squares):
        got = mamba.gated_norm(y, gate, norm, dtype, given)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    quarter = replace(norm, size=4 * norm.size)
    got = mamba.gated_norm(y, gate, quarter, dtype, 4 * squares)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    bare = mamba.gated_norm(y, gate, GatedNorm(None, 1e-5, 1, size, gate_first), dtype, None)
    plain = reference_gated_norm(y, gate, None, 0, 1, True)
    torch.testing.assert_close(bare.double(), plain, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_is_refused() -> None:
    layer = delta_layer(1, 1, 256, 128)
    step = delta_step(layer, [[3]], 1)
    inputs = replace(
        layer_inputs(layer, step.length, torch.float32, by_channel=False, corrects=True),
        qkv=torch.zeros(step.length, 640),
    )
    with pytest.raises(ValueError, match="a head's state is 256 x 128: at most 16384"):
        delta_rule.linear_attention(layer, inputs, step.states, step.rows)
    apart = replace(inputs, qkv=torch.zeros(640, step.length).T)
    with pytest.raises(ValueError, match="the numbers of a row lie side by side"):
        delta_rule.linear_attention(layer, apart, step.states, step.rows)
    sizes = MambaSizes(units=1, heads=1, head_dim=128, groups=1, state_dim=256, conv_kernel=2)
    with pytest.raises(ValueError, match="a head's state is 128 x 256: at most 16384"):
        mamba.mamba(torch.zeros(1, sizes.columns), mamba_weights(sizes), sizes, step.states, step.rows)
    with pytest.raises(ValueError, match="rows must be contiguous, not strided by 1, 2"):
        norm = GatedNorm(None, 1e-5, 1, 4, True)
        mamba.gated_norm(torch.zeros(2, 4), torch.zeros(2, 8)[:, ::2], norm, torch.float32, None)
