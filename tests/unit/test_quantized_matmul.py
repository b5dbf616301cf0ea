"""Matmul and experts with weights in codes on a CPU, against float64 with what the codes stand for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.activation_kind import RELU2
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.fp8 import quantize_fp8
from baton_kernels.int8 import quantize
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.reference import reference_experts
from tests.support.code_weights import FORMS, Form, random_weight
from tests.support.threads import in_threads

TYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 1e-5
"""The largest error of results in float32, in parts of the largest: products of codes are exact, and their
sums float32."""
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=("float32", "bfloat16"))


def packed(
    weight: QuantizedWeight, dtype: torch.dtype, bias: Tensor | None = None, *, gated: bool = False
) -> PackedWeight:
    made = PackedWeight.of(weight, bias, gated=gated, dtype=dtype, activation=SILU if gated else None)
    assert made is not None, "this machine has no compiler, which the README asks for"
    return made


def close(out: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()


@each_form
@each_type
def test_matmul_of_any_number_of_rows(form: Form, dtype: torch.dtype) -> None:
    """Several slices of each panel, of which the last panel is not full; 400 rows are several runs. A row's
    numbers are those of the row alone."""
    torch.manual_seed(0)
    weight, bias, x = random_weight(form, 136, 896), torch.randn(136), torch.randn(400, 896).to(dtype)
    ours = packed(weight, dtype, bias)
    out = ours.multiply(x, torch.float32)
    close(out, x.double() @ weight.dequantized().double().T + bias.double())
    for rows in (1, 4, 5, 7, 12, 13, 100):
        part = slice(rows, 2 * rows)
        assert torch.equal(ours.multiply(x[part], torch.float32), out[part])
    with in_threads(3):
        assert torch.equal(ours.multiply(x, torch.float32), out)


@each_form
@each_type
def test_gated_matmul_in_another_order(form: Form, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = tamed(random_weight(form, 2 * 70, 256, ordered=True)), torch.randn(2 * 70)
    x = torch.randn(9, 256).to(dtype)
    gate, up = (x.double() @ weight.dequantized().double().T + bias.double()).chunk(2, dim=-1)
    out = packed(weight, dtype, bias, gated=True).multiply(x, torch.float32)
    close(out, torch.nn.functional.silu(gate) * up)


def tamed(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight, its largest element 1/4, so that gates are neither open nor shut."""
    factor = 0.25 / float(weight.dequantized().abs().max())
    before = torch.ones(weight.codes.shape[:-1]) if weight.factors is None else weight.factors
    return replace(weight, factors=before * factor)


@each_form
@each_type
def test_experts(form: Form, dtype: torch.dtype) -> None:
    """Each projection's columns are in an order of their own."""
    torch.manual_seed(0)
    experts, hidden, inner = 3, 256, 128
    gate_up = tamed(random_weight(form, experts, 2 * inner, hidden, ordered=True))
    down = random_weight(form, experts, hidden, inner, ordered=True)
    biases = torch.randn(experts, 2 * inner), torch.randn(experts, hidden)
    ours = PackedExperts.of(gate_up, down, *biases, activation=SILU, dtype=dtype)
    assert ours is not None
    x, weights = torch.randn(20, hidden).to(dtype), torch.rand(20, 2)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(20)])
    tensors = ExpertTensors(gate_up.dequantized(), down.dequantized(), *biases, SILU)
    out = ours.multiply(x, chosen, weights, False)
    close(
        out, reference_experts(x, chosen, weights, tensors, False), 1e-5 if dtype == torch.float32 else 2e-2
    )
    for token in range(0, 20, 7):
        part = slice(token, token + 1)
        assert torch.equal(ours.multiply(x[part], chosen[part], weights[part], False), out[part])


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, RELU2], ids=lambda a: a.kind)
def test_experts_without_gates(activation: Activation) -> None:
    """Zero points of both projections, whose sums of inputs are made one after the other."""
    torch.manual_seed(0)
    form = Form("int4", 64, torch.float16, zeros=True)
    gate_up, down = tamed(random_weight(form, 2, 64, 128)), random_weight(form, 2, 128, 64, ordered=True)
    ours = PackedExperts.of(gate_up, down, activation=activation, dtype=torch.float32)
    assert ours is not None
    x, weights, chosen = torch.randn(30, 128), torch.rand(30, 1), torch.arange(30)[:, None] % 2
    tensors = ExpertTensors(gate_up.dequantized(), down.dequantized(), None, None, activation)
    out = ours.multiply(x, chosen, weights, False)
    close(out, reference_experts(x, chosen, weights, tensors, False))


@each_type
@pytest.mark.parametrize("group", [2, 6, 258, 600])
def test_matmul_with_groups_of_other_sizes(group: int, dtype: torch.dtype) -> None:
    """Small groups, of which a slice has few, and large ones, which are divided."""
    torch.manual_seed(group)
    weight = random_weight(Form("int4", group, zeros=True), 70, 2 * group)
    x = torch.randn(14, 2 * group).to(dtype)
    close(packed(weight, dtype).multiply(x, torch.float32), x.double() @ weight.dequantized().double().T)


@each_type
def test_every_code_of_fp8_is_exact(dtype: torch.dtype) -> None:
    """Subnormal ones, too, which a product of pairs of bfloat16 would take for 0."""
    numbers = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8)
    weight = QuantizedWeight(
        "fp8", numbers.view(torch.float8_e4m3fn)[:, None].repeat(1, 2), torch.ones(254, 1)
    )
    out = packed(weight, dtype).multiply(torch.tensor([[1.0, 0.0]]).to(dtype), torch.float32)
    assert torch.equal(out[0], numbers.view(torch.float8_e4m3fn).float())


@each_form
def test_memory_is_that_of_codes_and_scales(form: Form) -> None:
    weight = random_weight(form, 256, 1024)
    assert packed(weight, torch.bfloat16).nbytes <= 1.1 * weight.nbytes
    experts = PackedExperts.of(
        random_weight(form, 2, 256, 1024), random_weight(form, 2, 1024, 128), activation=SILU, dtype=TYPES[1]
    )
    assert experts is not None
    assert experts.nbytes <= 1.1 * 2 * (256 * 1024 + 1024 * 128) * weight.nbytes / (256 * 1024)


def test_matmuls_that_are_left_to_plain_torch() -> None:
    for shape, group in (((8, 15), None), ((8, 30), 15)):
        weight = random_weight(Form("int8", group), *shape)
        assert PackedWeight.of(weight, dtype=torch.float32) is None
    assert PackedWeight.of(random_weight(Form("fp8"), 8, 16), dtype=torch.float16) is None
    with pytest.raises(ValueError, match="dtype is None; allowed for a quantized weight"):
        PackedWeight.of(quantize(torch.randn(8, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_fp8_by_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(2, 40, 64) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    weight[1, 5] = 0
    rounded = quantize_fp8(weight)
    assert rounded.scales.shape == (2, 40, 1)
    largest = weight.float().abs().amax(-1)
    assert torch.equal(rounded.codes.float().abs().amax(-1), torch.where(largest > 0, 448.0, 0.0))
    off = (rounded.dequantized() - weight.float()).abs()
    steps = torch.maximum(weight.float().abs() * 2**-4, rounded.scales * 2**-10)
    assert (off <= 1.001 * steps).all()
    assert math.isfinite(float(rounded.dequantized().sum()))
    assert not rounded.dequantized()[1, 5].any()
