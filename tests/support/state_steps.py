"""A step of rows of all kinds over states in pages, and what its results are by a reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from baton_kernels.causal_conv import ConvWeights
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.delta_plain import by_unit, joined_cells, split_cells
from baton_kernels.kv_layout import KVGroup, StateKV
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.mamba_weights import MambaWeights
from baton_kernels.paged import StateRows, StateSegment
from baton_kernels.reference import reference_convolved, reference_scan
from baton_kernels.reference_states import reference_linear_attention
from baton_kernels.state_pages import LayerStates
from tests.support.covering import Choice
from tests.support.delta_cases import delta_layer, layer_inputs

Reference = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""The outputs of some rows, by the cells [units, size] in front of them, and the cells behind; float64."""
PER_PAGE = 2
LAYER = 1
"""The layer whose states are used, of three."""
_ROWS: Mapping[str, Sequence[object]] = MappingProxyType(
    {"queries": (1, 3), "chunks": (([3, 18, 1], [17, 2]), ([40],), ([1, 2, 3],), ())}
)
"""Rows of decoding sequences, and segments: some shorter than a convolution, some longer than a piece."""
DELTAS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "kind": ("gdn", "kda", "kda bounded", "lightning", "bare"),
        "heads": ((1, 2), (2, 1), (1, 3)),
        "dims": ((16, 16), (10, 20), (24, 12)),
        "taps": (3, 1),
        "dtype": (torch.bfloat16, torch.float32),
        **_ROWS,
    }
)
"""Levels of :class:`DeltaCase`. Heads: key heads, and the value heads of each."""
MAMBAS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "units": (1, 2, 3),
        "heads": (2, 4),
        "groups": ("one", "one a unit", "two a unit"),
        "dims": ((16, 16), (10, 7), (20, 18)),
        "taps": (3, 1),
        "limits": ((0.0, float("inf")), (0.4, 0.9)),
        "dtype": (torch.bfloat16, torch.float32),
        **_ROWS,
    }
)
"""Levels of :class:`MambaCase`."""


@dataclass(frozen=True)
class Run:
    """Rows of one sequence that follow each other, after which its state is kept."""

    rows: slice
    source: Tensor | None
    """None: the state of zeros."""
    target: Tensor | None
    """None: the rows are padding."""


@dataclass(frozen=True)
class StateStep:
    """The pages hold NaN where no state is."""

    states: LayerStates
    rows: StateRows
    runs: tuple[Run, ...]

    @classmethod
    def of(
        cls, units: int, size: int, chunks: Sequence[Sequence[int]], queries: int = 3, seed: int = 0
    ) -> StateStep:
        """``chunks``: the lengths of the segments of each; of every second chunk the last segment's target is
        its source. Sequences decode ``queries`` rows: one begins, the others have a state; of one row, it is
        overwritten; of several, the second one of some sequences is padding."""
        pages = -(-3 * units // PER_PAGE)
        count = 3 * queries + 3 + sum(map(len, chunks)) + 2 * len(chunks)
        group = KVGroup(StateKV(units, size), (0, 1, 2), range(pages), PER_PAGE)
        pool = torch.full((count * pages + 1, PER_PAGE * size + 5), float("nan"))
        states = LayerStates(pool, group, LAYER)
        order = list(range(1, len(pool)))
        random.Random(seed).shuffle(order)
        free = iter(torch.tensor(order).view(-1, pages))

        def begun() -> Tensor:
            table: Tensor = next(free)
            states.write(table[None], 0.3 * torch.randn(1, units, size))
            return table

        nowhere = torch.full((pages,), -1)
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        runs: list[Run] = []
        for sequence in range(3):
            at = begun() if sequence else None
            sources.append(nowhere if at is None else at)
            for query in range(queries):
                row = slice(len(targets), len(targets) + 1)
                if query == 1 and sequence < 2:
                    targets.append(nowhere)
                    runs.append(Run(row, at, None))
                    continue
                target = at if at is not None and queries == 1 else next(free)
                targets.append(target)
                runs.append(Run(row, at, target))
                at = target
        start, segments = len(targets), list[StateSegment]()
        for number, lengths in enumerate(chunks):
            at = begun() if number % 2 else None
            for length in lengths:
                target = next(free)
                if number % 2 and at is not None and length == lengths[-1]:
                    target = at
                segments.append(StateSegment(start, length, nowhere if at is None else at, target))
                runs.append(Run(slice(start, start + length), at, target))
                at, start = target, start + length
        rows = StateRows(torch.stack(sources), torch.stack(targets), tuple(segments))
        return cls(states, rows, tuple(runs))

    @property
    def length(self) -> int:
        """Rows of the step."""
        return len(self.rows.decode_targets) + sum(s.length for s in self.rows.segments)

    def on(self, device: torch.device) -> StateStep:
        """The step with its pages and tables on a device."""
        rows = self.rows
        segments = tuple(
            replace(s, source=s.source.to(device), target=s.target.to(device)) for s in rows.segments
        )
        moved = StateRows(rows.decode_sources.to(device), rows.decode_targets.to(device), segments)
        return replace(self, states=replace(self.states, pages=self.states.pages.to(device)), rows=moved)

    def expected(self, reference: Reference) -> tuple[Tensor, Tensor]:
        """The outputs of all rows, and the pages then, float64. Padding gives 0."""
        pages = self.states.pages.double()
        states = replace(self.states, pages=pages)
        outs: list[Tensor] = []
        for run in self.runs:
            kv = states.kv
            cells = (
                pages.new_zeros((kv.units, kv.size))
                if run.source is None
                else states.read(run.source[None])[0]
            )
            out, cells = reference(run.rows, cells)
            if run.target is None:
                out = torch.zeros_like(out)
            else:
                states.write(run.target[None], cells[None])
            outs.append(out)
        return torch.cat(outs), pages


def shares(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> Iterator[float]:
    """The largest differences of outputs and pages as shares of what is tolerated, ``tolerance`` times 1 +
    the expected value. Infinite where one is NaN and the other is not."""
    for one, other in zip(got, expected, strict=True):
        one = one.double().cpu()
        far = (one - other).abs() / (tolerance * (1 + other.abs()))
        both = one.isnan() & other.isnan()
        yield float(torch.where(both, 0.0, far).nan_to_num(nan=float("inf")).max())


def delta_step(
    layer: DeltaLayer, chunks: Sequence[Sequence[int]], queries: int = 3, seed: int = 0
) -> StateStep:
    """A step over states of a layer of linear attention."""
    size = layer.shared * layer.key_dim * layer.value_dim + layer.taps * layer.unit_channels
    return StateStep.of(layer.key_heads, size, chunks, queries, seed)


@dataclass(frozen=True)
class DeltaCase:
    """The arguments of ``baton_kernels.delta_rule.linear_attention``."""

    layer: DeltaLayer
    inputs: DeltaInputs
    step: StateStep

    @classmethod
    def of(cls, choice: Choice) -> DeltaCase:
        """Make the case of a choice of ``DELTAS``."""
        heads: Any = choice["heads"]
        dims: Any = choice["dims"]
        taps: Any = choice["taps"]
        dtype: Any = choice["dtype"]
        kind = str(choice["kind"])
        by_channel, corrects = kind.startswith("kda"), kind not in ("lightning", "bare")
        layer = delta_layer(*heads, *dims, taps=taps if corrects else 0, by_channel=by_channel)
        if kind == "kda bounded":
            layer = replace(layer, lower_bound=-5.0)
        if not corrects:
            layer = replace(layer, unit_vectors=False, dt_bias=None)
        if kind == "bare":
            layer = replace(layer, norm=None)
        step = delta_step(layer, choice["chunks"], choice["queries"])  # type: ignore[arg-type]
        inputs = layer_inputs(layer, step.length, dtype, by_channel=by_channel, corrects=corrects)
        return cls(layer, replace(inputs, gate=None) if kind == "bare" else inputs, step)

    def expected(self) -> tuple[Tensor, Tensor]:
        """See ``StateStep.expected``; to be called before the states change."""
        return self.step.expected(delta_reference(self.layer, self.inputs))


def delta_reference(layer: DeltaLayer, inputs: DeltaInputs) -> Reference:
    """Linear attention over the rows of ``inputs``."""
    # Channels in the order of the rows, by unit.
    channels = torch.arange(layer.key_heads * layer.unit_channels)
    order = by_unit(layer, channels)

    def compute(rows: slice, cells: Tensor) -> tuple[Tensor, Tensor]:
        state, by_units = split_cells(layer, cells[None])
        kept = cells.new_zeros((layer.taps, len(channels)))
        kept[:, order.flatten()] = by_units[0].transpose(0, 1).flatten(1)
        own = DeltaInputs(
            inputs.qkv[rows],
            *(None if x is None else x[rows] for x in (inputs.decay, inputs.beta, inputs.gate)),
        )
        out, new, kept = reference_linear_attention(layer, own, state[0], kept)
        units = by_unit(layer, kept).transpose(0, 1)
        return out.flatten(1), joined_cells(layer, new[None], units[None])[0]

    return compute


def mamba_step(
    sizes: MambaSizes, chunks: Sequence[Sequence[int]], queries: int = 3, seed: int = 0
) -> StateStep:
    """A step over states of a Mamba-2 layer."""
    kept = (sizes.conv_kernel - 1) * sizes.unit_channels
    return StateStep.of(sizes.units, sizes.state_size + kept, chunks, queries, seed)


def mamba_weights(sizes: MambaSizes, limits: tuple[float, float] = (0.0, float("inf"))) -> MambaWeights:
    """Random weights, the same for B and C of units of one group."""
    heads, channels = sizes.units * sizes.heads, sizes.units * sizes.unit_channels
    conv, bias = torch.randn(sizes.conv_kernel, channels) * 0.5, torch.randn(channels) * 0.3
    inner, *_ = sizes.channels
    for each in (conv.view(-1, sizes.units, sizes.unit_channels), bias.view(1, sizes.units, -1)):
        for unit in range(sizes.units):
            first = next(u for u in range(unit + 1) if sizes.first_group(u) == sizes.first_group(unit))
            each[:, unit, inner:] = each[:, first, inner:]
    rates = torch.linspace(0, 2.5, heads)
    return MambaWeights(ConvWeights(conv, bias), rates, torch.randn(heads), torch.randn(heads), limits)


@dataclass(frozen=True)
class MambaCase:
    """The arguments of ``baton_kernels.mamba.mamba``."""

    projected: Tensor
    weights: MambaWeights
    sizes: MambaSizes
    step: StateStep

    @classmethod
    def of(cls, choice: Choice) -> MambaCase:
        """Make the case of a choice of ``MAMBAS``."""
        units: Any = choice["units"]
        heads: Any = choice["heads"]
        dims: Any = choice["dims"]
        taps: Any = choice["taps"]
        groups = {"one": 1, "one a unit": units, "two a unit": 2 * units}[str(choice["groups"])]
        sizes = MambaSizes(units, heads, dims[0], groups, dims[1], taps + 1)
        step = mamba_step(sizes, choice["chunks"], choice["queries"])  # type: ignore[arg-type]
        weights = mamba_weights(sizes, choice["limits"])  # type: ignore[arg-type]
        projected = torch.randn(step.length, sizes.columns).to(choice["dtype"])  # type: ignore[call-overload]
        return cls(projected, weights, sizes, step)

    def expected(self) -> tuple[Tensor, Tensor]:
        """See ``StateStep.expected``; to be called before the states change."""
        return self.step.expected(mamba_reference(self.projected, self.weights, self.sizes))


def mamba_reference(projected: Tensor, weights: MambaWeights, sizes: MambaSizes) -> Reference:
    """A Mamba-2 layer over the rows of ``projected``, unit by unit."""
    groups, heads = sizes.groups * sizes.state_dim, sizes.units * sizes.heads
    parts = [sizes.inner, sizes.inner, groups, groups, heads]
    inner, of_unit, _ = sizes.channels
    taps = sizes.conv_kernel - 1

    def of(unit: int, rows: slice, cell: Tensor) -> tuple[Tensor, Tensor]:
        _, x, b, c, dt = projected[rows].double().split_with_sizes(parts, dim=-1)
        first = sizes.first_group(unit) * sizes.state_dim
        group = slice(first, first + of_unit)
        own = torch.cat((x[:, unit * inner : (unit + 1) * inner], b[:, group], c[:, group]), dim=1)
        at = slice(unit * sizes.unit_channels, (unit + 1) * sizes.unit_channels)
        bias = None if weights.conv.bias is None else weights.conv.bias[at]
        state, kept = cell[: sizes.state_size], cell[sizes.state_size :].view(taps, -1)
        mixed, kept = reference_convolved(own, kept, weights.conv.weight[:, at], bias)
        mixed = mixed / (1 + torch.exp(-mixed))
        x, b, c = mixed.split_with_sizes(sizes.channels, dim=1)
        here = slice(unit * sizes.heads, (unit + 1) * sizes.heads)
        steps = torch.log1p(torch.exp(dt[:, here] + weights.dt_bias[here])).clamp(*weights.dt_limits)
        b, c = (
            part.view(len(x), sizes.unit_groups, -1).repeat_interleave(sizes.heads // sizes.unit_groups, 1)
            for part in (b, c)
        )
        rates = -weights.a_log[here].double().exp()
        out, state = reference_scan(
            x.view(len(x), sizes.heads, -1), steps, rates, b, c, weights.d[here],
            state.view(sizes.heads, sizes.head_dim, -1),
        )  # fmt: skip
        return out.flatten(1), torch.cat((state.flatten(), kept.flatten()))

    def compute(rows: slice, cells: Tensor) -> tuple[Tensor, Tensor]:
        found = [of(unit, rows, cell) for unit, cell in enumerate(cells)]
        return torch.cat([out for out, _ in found], dim=1), torch.stack([cell for _, cell in found])

    return compute


def conv_reference(projected: Tensor, conv: ConvWeights, units: int) -> Reference:
    """The gated short convolution over the rows of ``projected``."""
    taps = len(conv.weight) - 1

    def compute(rows: slice, cells: Tensor) -> tuple[Tensor, Tensor]:
        b, c, x = projected[rows].double().chunk(3, dim=-1)
        kept = cells.view(units, taps, -1).transpose(0, 1).flatten(1)
        out, kept = reference_convolved(b * x, kept, conv.weight, conv.bias)
        return out * c, kept.view(taps, units, -1).transpose(0, 1).flatten(1)

    return compute
