"""The Triton kernels over rows against float64, under triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType

import pytest
import torch

from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.activation_kind import RELU2
from baton_kernels.attention import AttentionPlan, rotate_and_store
from baton_kernels.norm import Norm
from baton_kernels.reference import (
    reference_activated,
    reference_gated,
    reference_norm,
    reference_turned,
    reference_write_kv,
)
from baton_kernels.rotary import HeadNorm, WholeNorm
from tests.support.covering import Choice, covering
from tests.support.paged_steps import Case, lay_out

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import rotary, rows, whole_norm

pytestmark = pytest.mark.deep

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


def test_an_offset_is_added_to_the_weights_of_queries_and_keys() -> None:
    torch.manual_seed(0)
    pool, batch = lay_out(Case(4, 2, 64, 16, None, (40, 3), ((0, 5),)))
    tokens = batch.positions.numel()
    qkv, (cos, sin), (q, k) = torch.randn(tokens, 8, 64), torch.randn(2, tokens, 1, 64), torch.randn(2, 64)
    other = pool.clone()
    out = rotary.rotate_and_store(pool, 1, qkv, cos, sin, HeadNorm(q, k, 1e-5, offset=1.0), batch)
    expected = rotary.rotate_and_store(other, 1, qkv, cos, sin, HeadNorm(q + 1, k + 1, 1e-5), batch)
    assert torch.equal(out, expected)
    assert torch.equal(pool, other)


def test_heads_that_do_not_fit_are_refused() -> None:
    pool, batch = lay_out(Case(4, 2, 64, 16, None, (3,), ()))
    qkv, angles = torch.zeros(1, 8, 64), torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="heads of 32: allowed is an even size, and the pool's, 64"):
        rotary.rotate_and_store(pool, 0, qkv[..., :32], angles, angles, None, batch)
    with pytest.raises(ValueError, match=r"cos is .* torch.float64; allowed: .* float32"):
        rotary.rotate_and_store(pool, 0, qkv, angles.double(), angles, None, batch)


NORMS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "size": (64, 1000),
        "dtype": tuple(TOLERANCE),
        "adds": (False, True),
        "post": (None, "rms", "layer"),
        "norm": (None, "rms", "layer", "layer without bias"),
        "offset": (0.0, 1.0),
        "factor": (1.0, 0.22),
    }
)


def norm_of(kind: object, choice: Choice) -> Norm | None:
    """A norm with random weights, of the type of the choice."""
    size, dtype, offset = choice["size"], choice["dtype"], choice["offset"]
    assert isinstance(size, int)
    assert isinstance(dtype, torch.dtype)
    assert isinstance(offset, float)
    weight, bias = torch.randn(2, size).to(dtype)
    if kind is None:
        return None
    return Norm(weight, 1e-5, offset, centered=kind != "rms", bias=bias if kind == "layer" else None)


@pytest.mark.parametrize("choice", covering(NORMS), ids=lambda choice: "-".join(map(str, choice.values())))
def test_rows_are_normed_added_and_normed(choice: Choice) -> None:
    torch.manual_seed(0)
    size, dtype, factor = choice["size"], choice["dtype"], choice["factor"]
    assert isinstance(size, int)
    assert isinstance(dtype, torch.dtype)
    assert isinstance(factor, float)
    post, norm = norm_of(choice["post"], choice), norm_of(choice["norm"], choice)
    x, residual = (3 + torch.randn(7, size)).to(dtype), torch.randn(7, size) - 2
    added = residual.double()
    if choice["adds"]:
        added = added + reference_norm(x, post) * factor
    out = rows.add_norm(x if choice["adds"] else None, residual, norm, dtype, post=post, factor=factor)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), reference_norm(added, norm), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(residual.double(), added, rtol=1e-6, atol=5e-6)


def test_rows_that_lie_apart_are_refused() -> None:
    wide = torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"rows must lie behind each other, not \[32, 16\] apart"):
        rows.add_norm(wide[:, :16], torch.zeros(4, 16), None, torch.float32)
    with pytest.raises(ValueError, match="a row must be contiguous, not strided by 2"):
        rows.activated(wide[:, ::2], SILU)
    with pytest.raises(ValueError, match="a row must be contiguous, not strided by 2"):
        whole_norm.squares_of_heads(wide[:, ::2], WholeNorm(wide[0, :8], wide[0, :4], 1e-5))


# The limit of what overflows is right: x / (1 + infinity).
OVERFLOWING = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
ACTIVATIONS = pytest.mark.parametrize(
    "activation",
    [SILU, GELU_TANH, RELU2, Activation("clamped_swiglu", 7.0), Activation("scaled_silu", 0.7)],
    ids=lambda activation: activation.kind,
)


@OVERFLOWING
@DTYPES
@ACTIVATIONS
@pytest.mark.parametrize("size", [64, 1500])
def test_gated_product(size: int, activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (10 * torch.randn(5, 2 * size + 16)).to(dtype)[:, : 2 * size]
    expected = reference_gated(gate_up[:, :size], gate_up[:, size:], activation)
    out = rows.gated_product(gate_up, activation)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@OVERFLOWING
@DTYPES
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, RELU2], ids=lambda activation: activation.kind)
def test_activated(activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (10 * torch.randn(5, 1516)).to(dtype)[:, :1500]
    out = rows.activated(x, activation)
    assert out.dtype == dtype
    expected = reference_activated(x, activation)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_an_activation_that_needs_a_gate_is_refused_without() -> None:
    with pytest.raises(ValueError, match="clamped_swiglu; allowed without a gate: silu, gelu_tanh"):
        rows.activated(torch.zeros(1, 16), Activation("clamped_swiglu", 7.0))


@ACTIVATIONS
def test_what_is_no_number_stays_none(activation: Activation) -> None:
    gate_up = torch.zeros(2, 8)
    gate_up[0, 1] = gate_up[1, 6] = torch.nan
    assert rows.gated_product(gate_up, activation).isnan().nonzero().tolist() == [[0, 1], [1, 2]]


@DTYPES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 2, 20)])
def test_all_heads_together_are_normed(
    heads: int, kv_heads: int, head_dim: int, ranks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    qkv = torch.randn(ranks, 5, sum(sizes) + 16).to(dtype)[:, :, :-16]
    weights = [torch.randn(ranks, size).to(dtype) for size in sizes[:2]]
    parts = [*torch.split(qkv.double(), sizes, dim=-1)]
    for at, weight in enumerate(weights):
        mean = parts[at].square().mean((0, 2))[:, None]
        parts[at] = parts[at] / (mean + 1e-5).sqrt() * (weight[:, None].double() + 1)
    norms = [WholeNorm(q, k, 1e-5, offset=1.0) for q, k in zip(*weights, strict=True)]
    squares = zip(qkv, norms, strict=True)
    sums = torch.stack([whole_norm.squares_of_heads(part, norm) for part, norm in squares]).sum(0)
    alone = qkv[0].clone()
    whole_norm.norm_heads(alone, norms[0])
    for part, norm in zip(qkv, norms, strict=True):
        whole_norm.scale_heads(part, sums, norm, (ranks * sizes[0], ranks * sizes[1]))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(qkv.double(), torch.cat(parts, -1), rtol=tolerance, atol=tolerance)
    if ranks == 1:
        torch.testing.assert_close(alone, qkv[0])


def test_weights_and_squares_that_do_not_fit_are_refused() -> None:
    qkv, norm = torch.zeros(3, 64), WholeNorm(torch.zeros(48), torch.zeros(24), 1e-5)
    with pytest.raises(ValueError, match="weights of 48 and 24 for rows of 64"):
        whole_norm.norm_heads(qkv, norm)
    with pytest.raises(ValueError, match=r"squares are \(2, 2\) torch.float32; allowed: contiguous \(3, 2\)"):
        whole_norm.scale_heads(qkv, torch.zeros(2, 2), norm, (48, 24))
