"""The Triton kernels that round activations, and multiply what is rounded, under triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from baton_kernels.activation import SILU
from baton_kernels.code_formats import Rounding
from baton_kernels.norm import Norm
from baton_kernels.rounded_rows import RoundedRows, RowRounding, round_rows
from tests.support.quantized_cases import ROUNDED, QuantizedKind

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import products, quantized, rounding, rows, shapes

pytestmark = pytest.mark.deep

HOPPER = shapes.Device(4, 90)
FIXED = torch.tensor(0.02)
ROUNDINGS = {
    "fp8 rows": RowRounding("fp8"),
    "fp8 groups": RowRounding("fp8", 128),
    "fp8, one scale": RowRounding("fp8", scale=FIXED),
    "int8 rows": RowRounding("int8"),
}


def same(found: RoundedRows, expected: RoundedRows) -> None:
    assert found.codes.dtype == expected.codes.dtype
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rows_are_rounded_as_torch_rounds_them(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 384 + 8)[:, :384] * torch.logspace(-6, 2, 384)
    x[1], x[2, 5], x[4, 128:256] = 0, 3e4, 0
    for dtype in (torch.float32, torch.bfloat16):
        same(rounding.round_rows(x.to(dtype), ROUNDINGS[name]), round_rows(x.to(dtype), ROUNDINGS[name]))


def test_every_number_becomes_the_nearest_fp8() -> None:
    """Ties, subnormals, and what saturates among them."""
    numbers = torch.arange(0, 0x44000000, 1 << 15, dtype=torch.int32).view(torch.float32)
    x = torch.stack((numbers, -numbers))
    one = RowRounding("fp8", scale=torch.tensor(1.0))
    same(rounding.round_rows(x, one), round_rows(x, one))


@pytest.mark.parametrize("name", ROUNDINGS)
def test_norms_and_gates_round_what_they_would_have_stored(name: str) -> None:
    torch.manual_seed(1)
    how = ROUNDINGS[name]
    x, residual, weight = torch.randn(3, 256).bfloat16(), torch.randn(3, 256), torch.rand(256)
    norm = Norm(weight, 1e-5)
    stored, again = residual.clone(), residual.clone()
    expected = round_rows(rows.add_norm(x, stored, norm, torch.bfloat16), how)
    same(rows.add_norm_rounded(x, again, norm, torch.bfloat16, how), expected)
    assert torch.equal(stored, again)
    gate_up = torch.randn(3, 2 * 384).bfloat16()
    expected = round_rows(rows.gated_product(gate_up, SILU), how)
    same(rows.gated_product_rounded(gate_up, SILU, how), expected)


@pytest.mark.parametrize("asked", ROUNDED)
def test_products_are_those_of_the_rounded_rows(asked: Rounding) -> None:
    torch.manual_seed(0)
    weight = ROUNDED[asked].weight(80, 384)
    how = RowRounding.of(weight)
    assert how is not None
    for tokens, dtype in ((3, torch.float32), (70, torch.float32), (70, torch.bfloat16)):
        x = torch.randn(tokens, 384).bfloat16()
        bias = torch.randn(80)
        finish = products.Finish(bias, gated=True, activation=SILU)
        expected = round_rows(x, how).dequantized().double() @ weight.dequantized().double().T + bias
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
        out = quantized.multiply(x, weight, finish, dtype, HOPPER)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(out, quantized.multiply(round_rows(x, how), weight, finish, dtype, HOPPER))


def test_devices_without_units_for_fp8_leave_rows_as_they_are() -> None:
    torch.manual_seed(0)
    weight, x = ROUNDED["fp8-row"].weight(16, 64), torch.randn(2, 64)
    out = quantized.multiply(x, weight, products.Finish(), device=shapes.Device(4, 80))
    torch.testing.assert_close(out, x @ weight.dequantized().T, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_rounded_is_refused() -> None:
    weight = QuantizedKind("int4", rounding="fp8-row").weight(4, 32)
    with pytest.raises(ValueError, match="rounding is fp8-row for a weight of int4; allowed: fp8 without"):
        quantized.multiply(torch.zeros(1, 32), weight, products.Finish(), device=HOPPER)
    weight = QuantizedKind("fp8", 16, rounding="fp8-group").weight(4, 32)
    with pytest.raises(ValueError, match="groups of weights are of 16; allowed: multiples of 32"):
        quantized.multiply(torch.zeros(1, 32), weight, products.Finish(), device=HOPPER)
    with pytest.raises(ValueError, match="rows are of 100 inputs; allowed: whole groups of 128"):
        rounding.round_rows(torch.zeros(1, 100), RowRounding("fp8", 128))
