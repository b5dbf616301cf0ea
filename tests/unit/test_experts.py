"""The MLPs of experts against float64: the kernel and the loop of plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor

from baton_kernels.activation_kind import RELU2, SILU, Activation
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.experts import multiply
from baton_kernels.int8 import quantize
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.reference import reference_experts
from tests.support.covering import covering
from tests.support.threads import in_threads

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GELU = Activation("gelu_tanh")
MLPS = ((SILU, True), (GELU, True), (Activation("clamped_swiglu", 1.5), True), (RELU2, False), (GELU, False))
"""Activations, and whether they have a gate."""


@dataclass(frozen=True)
class Mixture:
    """Random experts, and what the packed ones stand for."""

    tensors: ExpertTensors
    packed: PackedExperts


def mixture(
    experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    *,
    activation: Activation = SILU,
    gated: bool = True,
    bias: bool = False,
    int8: bool = False,
) -> Mixture:
    rows = (1 + gated) * inner
    gate_up, down = torch.randn(experts, rows, hidden), torch.randn(experts, hidden, inner)
    biases = (torch.randn(experts, rows).to(dtype), torch.randn(experts, hidden).to(dtype))
    given: tuple[Tensor | None, Tensor | None] = biases if bias else (None, None)
    packing: tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]
    if int8:
        packing = rounded = quantize(gate_up), quantize(down)
        gate_up, down = (each.codes.double() * each.scales.double() for each in rounded)
    else:
        gate_up, down = packing = gate_up.to(dtype), down.to(dtype)
    packed = PackedExperts.of(packing[0], packing[1], *given, activation=activation, dtype=dtype)
    assert packed is not None, "this machine has no compiler, which the README asks for"
    return Mixture(ExpertTensors(gate_up, down, *given, activation), packed)


def chosen(tokens: int, experts: int, top_k: int, kind: str) -> Tensor:
    """[tokens, top_k] int32: different experts for each token. "random"; "same": all tokens choose the last
    ones; "few": some experts have no token."""
    least = {"random": 0, "same": experts - top_k, "few": min(experts // 2, experts - top_k)}[kind]
    rows = [least + torch.randperm(experts - least)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).int() if rows else torch.empty((0, top_k), dtype=torch.int32)


def expected(m: Mixture, x: Tensor, experts: Tensor, weights: Tensor, weighs_input: bool = False) -> Tensor:
    return reference_experts(x, experts, weights, m.tensors, weighs_input)


def close(out: Tensor, wanted: Tensor) -> None:
    """Within the tolerance of the largest value: sums of many products round as their largest parts do."""
    if len(wanted):
        assert (out.double() - wanted).abs().max() <= TOLERANCE[out.dtype] * wanted.abs().max()
    assert out.shape == wanted.shape


CASES = covering(
    {
        "tokens": [0, 1, 2, 7, 30],
        "experts": [1, 3, 8, 13],
        "hidden": [2, 34, 64, 130],
        "inner": [2, 32, 70],
        "top_k": [1, 2, 3],
        "kind": ["random", "same", "few"],
        "dtype": [torch.float32, torch.bfloat16],
        "mlp": MLPS,
        "bias": [False, True],
        "weighs_input": [False, True],
        "int8": [False, True],
    }
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: dict[str, object]) -> None:
    torch.manual_seed(0)
    experts, dtype = cast(int, case["experts"]), cast(torch.dtype, case["dtype"])
    tokens, hidden, inner = (cast(int, case[name]) for name in ("tokens", "hidden", "inner"))
    top_k = min(cast(int, case["top_k"]), experts)
    activation, gated = cast(tuple[Activation, bool], case["mlp"])
    options = {"gated": gated, "bias": bool(case["bias"]), "int8": bool(case["int8"])}
    m = mixture(experts, hidden, inner, dtype, activation=activation, **options)
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, top_k) + 0.1
    choice, weighs_input = chosen(tokens, experts, top_k, str(case["kind"])), bool(case["weighs_input"])
    wanted = expected(m, x, choice, weights, weighs_input)
    out = m.packed.multiply(x, choice, weights, weighs_input)
    assert out.dtype == dtype
    close(out, wanted)
    with in_threads(3):
        assert torch.equal(m.packed.multiply(x, choice, weights, weighs_input), out)
    if not case["int8"]:
        close(multiply(x, choice, weights, m.tensors, weighs_input), wanted)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("threads", [1, 3])
def test_all_tokens_choose_one_expert(int8: bool, dtype: torch.dtype, threads: int) -> None:
    """800 rows of one expert are several runs, however long."""
    torch.manual_seed(0)
    m, x, weights = mixture(3, 66, 34, dtype, int8=int8), torch.randn(800, 66).to(dtype), torch.rand(800, 1)
    experts = torch.full((800, 1), 1)
    with in_threads(threads):
        close(m.packed.multiply(x, experts, weights, False), expected(m, x, experts, weights))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_does_not_depend_on_its_neighbours(int8: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    m = mixture(5, 300, 40, dtype, int8=int8, bias=True)
    x, weights, experts = torch.randn(60, 300).to(dtype), torch.rand(60, 3), chosen(60, 5, 3, "random")
    together = m.packed.multiply(x, experts, weights, False)
    for count in (1, 2, 9, 31):
        for first in range(0, 60 - count, 7):
            part = slice(first, first + count)
            alone = m.packed.multiply(x[part], experts[part], weights[part], False)
            assert torch.equal(alone, together[part])


def test_experts_that_are_elsewhere_add_nothing() -> None:
    torch.manual_seed(0)
    m, x = mixture(4, 32, 32), torch.randn(3, 32)
    experts = torch.tensor([[0, 4], [-1, 7], [2, 1]])
    weights = torch.rand(3, 2)
    out = m.packed.multiply(x, experts, weights, False)
    close(out[:1], expected(m, x[:1], experts[:1, :1], weights[:1, :1]))
    assert not out[1].any()
    close(out[2:], expected(m, x[2:], experts[2:], weights[2:]))


def test_strided_inputs() -> None:
    torch.manual_seed(0)
    m, x = mixture(4, 32, 32), torch.randn(5, 2, 32)[:, 1]
    experts, weights = chosen(5, 4, 2, "random").mT.contiguous().mT, torch.rand(2, 5).mT
    close(m.packed.multiply(x, experts, weights, False), expected(m, x, experts, weights))


def test_what_would_be_misread_is_refused() -> None:
    m = mixture(4, 32, 32)
    experts, weights = torch.zeros((2, 1), dtype=torch.int32), torch.rand(2, 1)
    for x in (torch.randn(2, 31), torch.randn(2, 32).bfloat16(), torch.randn(1, 2, 32)):
        with pytest.raises(ValueError, match=r"rows of 32 torch\.float32 are allowed"):
            m.packed.multiply(x, experts, weights, False)
    for shape in ((2, 2), (3, 1)):
        with pytest.raises(ValueError, match="2 rows"):
            m.packed.multiply(torch.randn(2, 32), torch.zeros(shape, dtype=torch.int32), weights, False)


def test_what_the_kernels_do_not_take() -> None:
    sizes = {"odd hidden": (31, 32), "odd inner": (32, 31)}
    for hidden, inner in sizes.values():
        gate_up, down = torch.randn(2, 2 * inner, hidden), torch.randn(2, hidden, inner)
        assert PackedExperts.of(gate_up, down, activation=SILU) is None
    half = torch.randn(2, 64, 32).half(), torch.randn(2, 32, 32).half()
    assert PackedExperts.of(*half, activation=SILU) is None


def test_int8_takes_half_of_the_memory() -> None:
    rows = 2 * (2 * 64 + 128)
    assert mixture(2, 128, 64, torch.bfloat16).packed.nbytes == 2 * 3 * 128 * 64 * 2
    assert mixture(2, 128, 64, torch.bfloat16, int8=True).packed.nbytes == 2 * 3 * 128 * 64 + 4 * rows
