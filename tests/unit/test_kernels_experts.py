"""The Triton kernels of mixtures of experts against float64, under triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from baton_kernels.activation import SILU
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.experts import loop_over_experts
from baton_kernels.reference import reference_experts, reference_route
from baton_kernels.routing import Routing
from baton_kernels.routing import route as plain_route
from tests.support.covering import Choice, covering
from tests.support.expert_cases import EXPERTS, ROUTES, TOLERANCE, ExpertCase, RouteCase

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from baton_kernels.cuda.tuned import Tiling, TuningError
from tests.support.fake_cuda.device import FakeCuda
from tests.support.interpreted import expert_shapes, experts, many_experts, routing

pytestmark = pytest.mark.deep


def shape_of(tensors: ExpertTensors, arch: int = 90) -> expert_shapes.ExpertShape:
    count, hidden, inner = tensors.down.shape
    return expert_shapes.ExpertShape(hidden, inner, count, tensors.down.dtype, arch)


def case_of(**levels: Any) -> ExpertCase:
    default = {name: values[0] for name, values in EXPERTS.items()}
    return ExpertCase.of({**default, "hidden": 64, "inner": 40, **levels})


def multiply(case: ExpertCase, arch: int = 90) -> Tensor:
    shape = shape_of(case.tensors, arch)
    return experts.multiply(case.x, case.experts, case.weights, case.tensors, case.weighs_input, shape)


def reference(case: ExpertCase) -> Tensor:
    return reference_experts(case.x, case.experts, case.weights, case.tensors, case.weighs_input)


@pytest.mark.parametrize("choice", covering(EXPERTS), ids=lambda choice: f"{choice['tokens']} tokens")
def test_each_token_goes_through_its_experts(choice: Choice) -> None:
    torch.manual_seed(0)
    case = ExpertCase.of(choice)
    out = multiply(case, arch=choice["arch"])  # type: ignore[arg-type]
    assert out.dtype == case.x.dtype
    assert out.is_contiguous()
    tolerance = TOLERANCE[case.x.dtype]
    torch.testing.assert_close(out.double(), reference(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weighs_input", [False, True], ids=["", "weighs_input"])
def test_the_plain_loop_is_the_reference(weighs_input: bool) -> None:
    for choice in covering(EXPERTS)[:12]:
        case = ExpertCase.of({**choice, "weighs_input": weighs_input, "dtype": torch.float32})
        out = loop_over_experts(case.x, case.experts, case.weights, case.tensors, case.weighs_input)
        torch.testing.assert_close(out.double(), reference(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", covering(ROUTES), ids=lambda choice: str(choice["scores"]))
def test_experts_are_chosen_and_weighed(choice: Choice) -> None:
    torch.manual_seed(1)
    case = RouteCase.of(choice)
    expected, weights = reference_route(case.logits, case.routing, case.bias)
    found, by_kernel = routing.route(case.logits, case.routing, case.bias)
    assert (found.dtype, by_kernel.dtype) == (torch.int32, torch.float32)
    assert found.tolist() == expected
    torch.testing.assert_close(by_kernel.double(), weights, rtol=2e-6, atol=1e-7)
    if case.logits.dtype == torch.float32:  # torch takes any of equal experts
        found, by_torch = plain_route(case.logits, case.routing, case.bias)
        assert found.tolist() == expected
        torch.testing.assert_close(by_torch.double(), weights, rtol=2e-6, atol=1e-7)


def test_1024_experts_and_none_that_compares() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 1024)
    found, _ = routing.route(logits, Routing(8))
    assert found.tolist() == reference_route(logits, Routing(8))[0]
    found, _ = routing.route(torch.full((2, 60), torch.nan), Routing(4))
    assert ((found >= 0) & (found < 60)).all()
    with pytest.raises(ValueError, match="1025 experts to choose from: at most 1024"):
        routing.route(torch.zeros(1, 1025), Routing(1))
    with pytest.raises(ValueError, match=r"bias of the choice is torch.float64; allowed: float32"):
        routing.route(torch.zeros(1, 8), Routing(1), torch.zeros(8).double())


def test_pairs_are_sorted_by_expert() -> None:
    """More than one program goes through at a time, and in their order where the expert is the same."""
    torch.manual_seed(0)
    chosen = torch.randint(0, 7, (1200, 2), dtype=torch.int32)
    chosen[chosen == 3] = 4
    order, starts = many_experts.sorted_by_expert(chosen, 7)
    flat = chosen.flatten()
    assert torch.equal(order, flat.argsort(stable=True).int())
    assert starts.tolist() == [0, *flat.bincount(minlength=7).cumsum(0).tolist()]
    assert starts[3] == starts[4]


@pytest.mark.parametrize(("tokens", "kernels"), [(2, "interpreted"), (17, "interpreted"), (17, "plain")])
def test_a_step_is_captured_whatever_the_routing(
    tokens: int, kernels: Literal["plain", "interpreted"]
) -> None:
    """Nothing is read back, and every address is the device's own: the fake device checks both. Plain torch
    stands in for the kernels alike."""
    torch.manual_seed(0)
    case = case_of(tokens=tokens, experts=8, top_k=2, hidden=32, inner=16, biased=True)
    with FakeCuda(kernels=kernels):
        tensors = on_device(case.tensors)
        x, bias = case.x.to("cuda"), torch.zeros(8, device="cuda")
        logits = torch.randn(tokens, 8).to("cuda")
        rule = Routing(2, renormalize=True)

        def step() -> tuple[Tensor, Tensor, Tensor]:
            chosen, weights = routing.route(logits, rule, bias)
            return experts.multiply(x, chosen, weights, tensors, False), chosen, weights

        experts.warm_up(tensors, 2, False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        results = []
        for favourite in (0, 7):
            bias.zero_()[favourite] = 9
            graph.replay()
            results.append([tensor.cpu() for tensor in out])
    for favourite, (found, chosen, weights) in zip((0, 7), results, strict=True):
        assert (chosen[:, 0] == favourite).all()
        expected = reference_experts(case.x, chosen, weights, case.tensors, False)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def on_device(tensors: ExpertTensors) -> ExpertTensors:
    assert tensors.gate_up_bias is not None
    assert tensors.down_bias is not None
    return replace(
        tensors,
        gate_up=tensors.gate_up.to("cuda"),
        down=tensors.down.to("cuda"),
        gate_up_bias=tensors.gate_up_bias.to("cuda"),
        down_bias=tensors.down_bias.to("cuda"),
    )


def test_a_token_s_results_are_added_in_the_order_of_its_experts() -> None:
    """1 + 2**24 - 2**24 is 0 in float32, and 2**24 - 2**24 + 1 is 1."""
    down = torch.zeros(4, 32, 16)
    down[0, 0, 0], down[1, 0, 0], down[2, 0, 0] = 1.0, 2.0**24, -(2.0**24)
    up = torch.zeros(4, 32, 32)
    up[:, 0, 0], up[:, 16, 0] = 40.0, 1 / 40  # silu(40) / 40 is 1
    tensors = ExpertTensors(up, down, None, None, SILU)
    for tokens in (1, 9):
        x = torch.zeros(tokens, 32)
        x[:, 0] = 1
        for order, expected in (([0, 1, 2], 0.0), ([1, 2, 0], 1.0)):
            chosen = torch.tensor([order] * tokens, dtype=torch.int32)
            shape = shape_of(tensors)
            out = experts.multiply(x, chosen, torch.ones(tokens, 3), tensors, False, shape)
            assert out[:, 0].tolist() == [expected] * tokens


def test_sizes_of_tiles_follow_the_number_of_pairs() -> None:
    shape = expert_shapes.ExpertShape(2048, 768, 128, torch.bfloat16, 90)
    assert [shape.rows(pairs) for pairs in (129, 1024, 2048, 4096, 65536)] == [16, 16, 32, 64, 128]
    for tiling in (shape.gate_up, shape.down):
        assert [tiling(rows).rows for rows in (16, 32, 64, 128)] == [16, 32, 64, 128]
    counts = expert_shapes.token_counts(shape, 8)
    assert [shape.rows(8 * tokens) for tokens in counts[1:]] == [16, 32, 64, 128]
    assert 8 * counts[0] <= shape.most_few < 8 * counts[1]


def test_tile_sizes_may_be_tuned() -> None:
    torch.manual_seed(0)
    case = case_of(tokens=70, experts=5, top_k=2)
    shape = shape_of(case.tensors)
    rows = shape.rows(case.experts.numel())
    ours = {
        shape.name("gate_up", rows): Tiling(rows, 16, 2, 2),
        shape.name("down", rows): Tiling(rows, 32, 2, 2),
    }
    tuned = replace(shape, tuned=ours)
    assert (tuned.gate_up(rows).tile, tuned.down(rows).tile) == (16, 32)
    assert tuned.gate_up(16) == shape.gate_up(16)
    out = experts.multiply(case.x, case.experts, case.weights, case.tensors, False, tuned)
    torch.testing.assert_close(out.double(), reference(case), rtol=1e-5, atol=1e-5)
    wrong = replace(shape, tuned={shape.name("down", rows): Tiling(16, 32, 2, 2)})
    with pytest.raises(TuningError, match=f"down is tuned to 16 rows; allowed: {rows}"):
        wrong.down(rows)


def test_what_does_not_fit_is_refused() -> None:
    case = case_of(tokens=3)
    with pytest.raises(ValueError, match=r"x is torch.float16; allowed: torch.float32, as down is"):
        multiply(replace(case, x=case.x.half()))
    with pytest.raises(ValueError, match="rows of x must be contiguous, not strided by 2"):
        multiply(replace(case, x=torch.zeros(3, 128)[:, ::2]))
    with pytest.raises(ValueError, match=r"experts torch.int64, weights .*; allowed: int32, float32"):
        multiply(replace(case, experts=case.experts.long()))
    with pytest.raises(ValueError, match=r"must be contiguous, not \(2, 2\) apart"):
        multiply(replace(case, weights=torch.zeros(3, 2)[:, ::2]))
    with pytest.raises(ValueError, match=r"experts of torch.float64: allowed are"):
        expert_shapes.ExpertShape(64, 64, 8, torch.float64, 90)
    with pytest.raises(ValueError, match=r"compute capability is 7.5: at least 8.0"):
        expert_shapes.ExpertShape(64, 64, 8, torch.float32, 75)
