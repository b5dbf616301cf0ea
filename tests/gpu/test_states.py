"""The Triton kernels of layers that keep a state on a device, against the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from baton_kernels.causal_conv import ConvWeights, short_conv
from baton_kernels.delta_rule import linear_attention
from baton_kernels.mamba import gated_norm, mamba
from baton_kernels.mamba_weights import GatedNorm
from baton_kernels.paged import StateRows
from baton_kernels.reference import reference_gated_norm
from tests.support.state_steps import DeltaCase, MambaCase, StateStep, conv_reference, shares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
CHUNKS: tuple[Sequence[Sequence[int]], ...] = (([3, 150, 1], [70, 2]), ([1, 2, 3],), ())
Made = TypeVar("Made")


def on_device(made: Made) -> Made:
    """A dataclass with its tensors, and those of dataclasses in it, on the device."""
    changes: dict[str, Any] = {}
    for field in fields(made):  # type: ignore[arg-type]
        value = getattr(made, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value.to(CUDA)
        elif is_dataclass(value):
            changes[field.name] = on_device(value)
    return replace(made, **changes)  # type: ignore[type-var]


@DTYPES
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["gdn", "kda", "kda bounded", "lightning", "bare"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 96), (10, 12)], ids=str)
def test_linear_attention(kind: str, dims: tuple[int, int], queries: int, dtype: torch.dtype) -> None:
    for seed, chunks in enumerate(CHUNKS):
        torch.manual_seed(seed)
        choice = {"kind": kind, "heads": (2, 2), "dims": dims, "taps": 3, "dtype": dtype}
        case = DeltaCase.of({**choice, "queries": queries, "chunks": chunks})
        expected, step = case.expected(), case.step.on(CUDA)
        out = linear_attention(on_device(case.layer), on_device(case.inputs), step.states, step.rows)
        assert out.dtype == dtype
        assert max(shares((out, step.states.pages), expected, TOLERANCE[dtype])) <= 1


@DTYPES
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dims", [(64, 128), (64, 256), (20, 18)], ids=str)
def test_mamba(dims: tuple[int, int], queries: int, dtype: torch.dtype) -> None:
    for seed, chunks in enumerate(CHUNKS):
        torch.manual_seed(seed)
        sizes = {"units": 2, "heads": 4, "groups": "one a unit", "dims": dims, "taps": 3}
        limits = (0.0, float("inf"))
        case = MambaCase.of({**sizes, "limits": limits, "dtype": dtype, "queries": queries, "chunks": chunks})
        expected, step = case.expected(), case.step.on(CUDA)
        out = mamba(case.projected.to(CUDA), on_device(case.weights), case.sizes, step.states, step.rows)
        assert max(shares((out, step.states.pages), expected, TOLERANCE[dtype])) <= 1


@pytest.mark.parametrize("queries", [1, 3])
def test_short_convolutions(queries: int) -> None:
    for seed, chunks in enumerate(CHUNKS):
        torch.manual_seed(seed)
        conv = ConvWeights(torch.randn(3, 2048), None)
        step = StateStep.of(8, 2 * 256, chunks, queries)
        projected = torch.randn(step.length, 3 * 2048)
        expected = step.expected(conv_reference(projected, conv, 8))
        step = step.on(CUDA)
        out = short_conv(projected.to(CUDA), on_device(conv), step.states, step.rows.described)
        assert max(shares((out, step.states.pages), expected, 1e-5)) <= 1


@DTYPES
@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_norms(gate_first: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y, gate, weight = torch.randn(33, 4096), torch.randn(33, 8192)[:, 4096:], torch.randn(4096)
    expected = reference_gated_norm(y, gate, weight, 1e-5, 8, gate_first)
    norm = GatedNorm(weight.to(CUDA), 1e-5, 8, 512, gate_first)
    out = gated_norm(y.to(CUDA), gate.to(CUDA), norm, dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_captured_step_decodes_by_the_tables_it_finds(kind: str) -> None:
    torch.manual_seed(0)
    choice = {"kind": kind, "heads": (2, 2), "dims": (128, 128), "taps": 3, "dtype": torch.bfloat16}
    case = DeltaCase.of({**choice, "queries": 3, "chunks": ()})
    expected, step = case.expected(), case.step.on(CUDA)
    layer, inputs = on_device(case.layer), on_device(case.inputs)
    none = torch.full_like(step.rows.decode_targets, -1)
    rows = StateRows(none[: len(step.rows.decode_sources)].clone(), none, ())
    linear_attention(layer, inputs, step.states, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_attention(layer, inputs, step.states, rows)
    graph.replay()
    assert not out.any()
    rows.decode_sources.copy_(step.rows.decode_sources)
    rows.decode_targets.copy_(step.rows.decode_targets)
    graph.replay()
    assert max(shares((out, step.states.pages), expected, TOLERANCE[torch.bfloat16])) <= 1
