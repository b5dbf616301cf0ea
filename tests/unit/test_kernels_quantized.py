"""The Triton kernels of quantized weights against float64, under triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.reference import reference_activated, reference_gated
from tests.support.quantized_cases import KINDS

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import products, quantized, shapes

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
DTYPES = tuple(TOLERANCE)
CLAMPED = Activation("clamped_swiglu", 0.7)


def device(arch: int) -> shapes.Device:
    return shapes.Device(4, arch)


def reference(x: Tensor, weight: QuantizedWeight, finish: products.Finish) -> Tensor:
    product = x.double() @ weight.dequantized().double().T
    if finish.bias is not None:
        product += finish.bias.double()
    if finish.activation is None:
        return product
    if finish.gated:
        return reference_gated(*product.chunk(2, -1), finish.activation)
    return reference_activated(product, finish.activation)


def finishes(outputs: int, dtype: torch.dtype) -> list[products.Finish]:
    return [
        products.Finish(),
        products.Finish(torch.randn(outputs).to(dtype), gated=True, activation=CLAMPED),
        products.Finish(torch.randn(outputs).to(dtype), activation=GELU_TANH),
        products.Finish(gated=True, activation=SILU),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_weights_that_codes_stand_for(kind: str) -> None:
    torch.manual_seed(0)
    inputs = {16: 80, 32: 160, 48: 96, 64: 192, 128: 384}.get(KINDS[kind].group, 90)
    weight = KINDS[kind].weight(70, inputs)
    for number, tokens in enumerate((1, 3, 20, 67)):
        dtype, arch = DTYPES[number % 3], (80, 90)[number % 2]
        x = torch.randn(tokens, inputs + 6).to(dtype)[:, :inputs]
        finish = finishes(70, dtype)[number]
        out = quantized.multiply(x, weight, finish, torch.float32, device(arch))
        expected = reference(x, weight, finish)
        assert (out.shape, out.dtype) == (expected.shape, torch.float32)
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
