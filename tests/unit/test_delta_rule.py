"""Linear attention by the CPU's kernels and by plain torch against float64, and against itself in other
runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels import delta_plain
from baton_kernels.cpu import delta as cpu_delta
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.delta_plain import split_cells
from baton_kernels.delta_rule import linear_attention
from baton_kernels.paged import StateRows
from baton_kernels.reference_states import reference_linear_attention
from baton_kernels.state_pages import LayerStates
from tests.support.delta_cases import LAYERS, PagedStates, random_inputs

pytestmark = pytest.mark.deep

Compute = Callable[[DeltaLayer, DeltaInputs, LayerStates, StateRows], Tensor]
COMPUTE: dict[str, Compute] = {"default": linear_attention, "plain": delta_plain.linear_attention}
NATIVE = [name for name in LAYERS if not name.endswith("odd")]


def some(inputs: DeltaInputs, rows: slice) -> DeltaInputs:
    taken = {
        name: None if (x := getattr(inputs, name)) is None else x[rows] for name in ("decay", "beta", "gate")
    }
    return replace(inputs, qkv=inputs.qkv[rows], **taken)


def in_runs(
    name: str, compute: Compute, inputs: DeltaInputs, lengths: list[int], *, whole_steps: bool = False
) -> tuple[Tensor, Tensor]:
    """The outputs of one sequence that is computed in runs, and its last cells. A run of 1 is decoded."""
    layer, paged = LAYERS[name][0], PagedStates.of(LAYERS[name][0])
    source, start = paged.none, 0
    outputs: list[Tensor] = []
    for length in lengths:
        target = source if source[0] >= 0 and len(outputs) % 2 else paged.table()
        rows = paged.rows([(source, [target])]) if length == 1 else paged.rows([], [(length, source, target)])
        outputs.append(compute(layer, some(inputs, slice(start, start + length)), paged.states, rows))
        source, start = target, start + length
    return torch.cat(outputs), paged.states.read(source[None])


def expected(name: str, inputs: DeltaInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The reference from a state of zeros on: outputs, state, and the inputs kept by key head."""
    layer = LAYERS[name][0]
    zeros = torch.zeros(layer.value_heads, layer.key_dim, layer.value_dim)
    kept = torch.zeros(layer.taps, inputs.qkv.shape[1])
    out, state, kept = reference_linear_attention(layer, inputs, zeros, kept)
    return out.flatten(1), state, delta_plain.by_unit(layer, kept).transpose(0, 1)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", LAYERS)
def test_runs_of_any_length_are_the_reference(name: str, compute: str) -> None:
    torch.manual_seed(1)
    inputs = random_inputs(name, 150)
    layer, (out, state, kept) = LAYERS[name][0], expected(name, inputs)
    for lengths in ([150], [1] * 9 + [2, 3, 136], [64, 7, 1, 78]):
        got, cells = in_runs(name, COMPUTE[compute], inputs, lengths)
        got_state, got_kept = split_cells(layer, cells)
        torch.testing.assert_close(got.double(), out, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(got_state[0].double(), state, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(got_kept[0].double(), kept, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NATIVE)
def test_the_kernels_give_the_same_bits_in_whatever_runs(name: str) -> None:
    torch.manual_seed(2)
    inputs = random_inputs(name, 100)
    whole, cells = in_runs(name, linear_attention, inputs, [100])
    for lengths in ([1] * 100, [33, 1, 2, 64]):
        got, got_cells = in_runs(name, linear_attention, inputs, lengths)
        assert torch.equal(got, whole)
        assert torch.equal(got_cells, cells)


@pytest.mark.parametrize("name", LAYERS)
def test_what_the_kernels_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take every layer of whole vectors; plain torch computes the others."""
    called: list[str] = []
    plain = delta_plain.linear_attention

    def counted(*args: object) -> Tensor:
        called.append(name)
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("baton_kernels.delta_rule.plainly.linear_attention", counted)
    paged = PagedStates.of(LAYERS[name][0])
    for dtype in (torch.float32, torch.bfloat16):
        rows = paged.rows([], [(2, paged.none, paged.table())])
        linear_attention(LAYERS[name][0], random_inputs(name, 2, dtype), paged.states, rows)
    assert len(called) == (0 if name in NATIVE else 2)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", ["gdn", "gdn-odd", "kda", "lightning"])
def test_a_step_of_drafts_padding_and_chained_segments(name: str, compute: str) -> None:
    """Sequences a (a begun one with three rows, the last of them padding), b (one that begins with its rows)
    and two chunks, of which the first keeps its state in the middle."""
    torch.manual_seed(3)
    layer, paged = LAYERS[name][0], PagedStates.of(LAYERS[name][0])
    inputs = random_inputs(name, 70)
    a, begun = paged.table(), random_inputs(name, 40)
    run = COMPUTE[compute]
    run(layer, begun, paged.states, paged.rows([], [(40, paged.none, a)]))
    before = paged.states.read(a[None])
    drafts = [paged.table() for _ in range(5)]
    middle, end, other = paged.table(), paged.table(), paged.table()
    rows = paged.rows(
        [(a, [drafts[0], drafts[1], paged.none]), (paged.none, drafts[2:])],
        [(20, paged.none, middle), (37, middle, end), (7, paged.none, other)],
    )
    got = run(layer, inputs, paged.states, rows)
    assert torch.equal(paged.states.read(a[None]), before)

    def check(ids: list[int], targets: list[tuple[int, Tensor]], first: DeltaInputs | None = None) -> None:
        """The rows ``ids``, behind the inputs ``first``; after so many of them, these states are kept."""
        own = some(inputs, slice(ids[0], ids[-1] + 1))
        both = own if first is None else joined(first, own)
        offset = len(both.qkv) - len(ids)
        torch.testing.assert_close(got[ids].double(), expected(name, both)[0][offset:], rtol=1e-4, atol=2e-5)
        for count, table in targets:
            _, state, kept = expected(name, some(both, slice(0, offset + count)))
            got_state, got_kept = split_cells(layer, paged.states.read(table[None]))
            torch.testing.assert_close(got_state[0].double(), state, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(got_kept[0].double(), kept, rtol=1e-6, atol=1e-6)

    check([0, 1], [(1, drafts[0]), (2, drafts[1])], begun)
    assert not got[2].any()
    check([3, 4, 5], [(1, drafts[2]), (2, drafts[3]), (3, drafts[4])])
    check([*range(6, 63)], [(20, middle), (57, end)])
    check([*range(63, 70)], [(7, other)])


def joined(first: DeltaInputs, second: DeltaInputs) -> DeltaInputs:
    def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.cat((a, b))

    return DeltaInputs(
        torch.cat((first.qkv, second.qkv)),
        both(first.decay, second.decay),
        both(first.beta, second.beta),
        both(first.gate, second.gate),
    )


@pytest.mark.parametrize("name", ["gdn", "kda", "lightning"])
def test_bfloat16_inputs_are_rounded_and_nothing_else(name: str) -> None:
    torch.manual_seed(4)
    inputs = random_inputs(name, 90, torch.bfloat16)
    out, state, _ = expected(name, inputs)
    got, cells = in_runs(name, linear_attention, inputs, [90])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), out, rtol=2**-8, atol=2e-5)
    got_state, _ = split_cells(LAYERS[name][0], cells)
    torch.testing.assert_close(got_state[0].double(), state, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_decays_that_forget_everything_at_once(name: str, compute: str) -> None:
    torch.manual_seed(5)
    inputs = random_inputs(name, 70)
    assert inputs.decay is not None
    inputs = replace(inputs, decay=inputs.decay + 90.0 * (torch.arange(70) % 20 == 0)[:, None])
    got, _ = in_runs(name, COMPUTE[compute], inputs, [70])
    torch.testing.assert_close(got.double(), expected(name, inputs)[0], rtol=1e-4, atol=1e-4)


def test_rows_whose_numbers_lie_apart_are_refused() -> None:
    layer, paged = LAYERS["gdn"][0], PagedStates.of(LAYERS["gdn"][0])
    inputs = random_inputs("gdn", 4)
    apart = replace(inputs, qkv=inputs.qkv.T.contiguous().T)
    with pytest.raises(ValueError, match="side by side"):
        cpu_delta.linear_attention(
            layer, apart, paged.states, paged.rows([], [(4, paged.none, paged.table())])
        )
