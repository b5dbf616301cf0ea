"""The Triton kernels of quantized weights against float64, under triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.expert_tensors import ExpertTensors, QuantizedExpertTensors
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.quantized_linear import multiply_quantized, multiply_quantized_experts, warm_up
from baton_kernels.reference import reference_activated, reference_experts, reference_gated
from tests.support.quantized_cases import KINDS, QuantizedKind, on

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.fake_cuda.device import FakeCuda
from tests.support.interpreted import expert_shapes, products, quantized, shapes
from tests.support.interpreted import experts as cuda_experts

pytestmark = pytest.mark.deep

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
        gate, up = product.chunk(2, -1)
        return reference_gated(gate, up, finish.activation)
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


@pytest.mark.parametrize(
    "kind", ["int8 rows", "fp8 groups of 128", "int4 groups of 64, zeros, order", "NVFP4"]
)
def test_experts_are_those_that_codes_stand_for(kind: str) -> None:
    """Few pairs, each by itself, and many in tiles."""
    torch.manual_seed(0)
    hidden, inner = {0: (72, 50), 128: (256, 128)}.get(KINDS[kind].group, (128, 64))
    gate_up, down = KINDS[kind].weight(3, 2 * inner, hidden), KINDS[kind].weight(3, hidden, inner)
    for tokens, dtype, arch in ((1, torch.bfloat16, 80), (5, torch.float32, 90)):
        biases = (torch.randn(3, 2 * inner).to(dtype), torch.randn(3, hidden).to(dtype))
        tensors = QuantizedExpertTensors(gate_up, down, *biases, CLAMPED, dtype)
        plain = ExpertTensors(gate_up.dequantized(), down.dequantized(), *biases, CLAMPED)
        x = torch.randn(tokens, hidden).to(dtype)
        experts = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)]).int()
        weights = torch.rand(tokens, 2)
        expected = reference_experts(x, experts, weights, plain, False)
        shape = expert_shapes.ExpertShape.of(tensors, device(arch))
        tolerance = TOLERANCE[dtype]
        for out in (
            cuda_experts.multiply(x, experts, weights, tensors, False, shape),
            multiply_quantized_experts(x, experts, weights, tensors, False),
        ):
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["fp8 rows", "int4 groups of 64, zeros, order"])
def test_plain_torch_multiplies_alike(kind: str) -> None:
    torch.manual_seed(0)
    weight, x = KINDS[kind].weight(32, 128), torch.randn(2, 3, 128)
    finish = products.Finish(torch.randn(32), gated=True, activation=SILU)
    out = multiply_quantized(x, weight, finish.bias, gated=True, activation=SILU, out_dtype=torch.float64)
    expected = reference(x.flatten(0, 1), weight, finish).view(2, 3, 16)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_step_is_captured() -> None:
    """Nothing is read back, and every address is the device's own: the fake device checks both."""
    torch.manual_seed(0)
    weight, x = KINDS["int4 groups of 64, zeros, order"].weight(32, 128), torch.randn(3, 128)
    with FakeCuda(kernels="interpreted"):
        there, rows = on(weight, "cuda"), x.to("cuda")
        warm_up(there, dtype=torch.float32, gated=True, activation=SILU)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = multiply_quantized(rows, there, gated=True, activation=SILU)
        rows.mul_(2)
        graph.replay()
        found = out.cpu()
    expected = reference(2 * x, weight, products.Finish(gated=True, activation=SILU))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_no_kernel_takes_is_refused() -> None:
    x, odd = torch.zeros(1, 40), KINDS["int8 rows"].weight(4, 40)
    with pytest.raises(ValueError, match="groups are of 8 inputs; allowed: whole rows, and multiples of 16"):
        quantized.multiply(x, QuantizedKind("int4", 8).weight(4, 40), products.Finish(), device=device(90))
    with pytest.raises(ValueError, match="codes of a quantized weight must be contiguous, not"):
        strided = replace(odd, codes=odd.codes.T.contiguous().T)
        quantized.multiply(x, strided, products.Finish(), device=device(90))
    with pytest.raises(ValueError, match="x has rows of 40; allowed for this weight: 90"):
        quantized.multiply(x, KINDS["int8 rows"].weight(4, 90), products.Finish(), device=device(90))
    with pytest.raises(ValueError, match="activation is clamped_swiglu; allowed without a gate: silu"):
        products.Finish(activation=CLAMPED)
    with pytest.raises(ValueError, match=r"compute capability is 7\.5; allowed: from 8.0 on"):
        quantized.multiply(x, odd, products.Finish(), device=device(75))
