"""Causal convolutions of each channel by itself, whose last inputs are kept in cells.

Each unit has channels of three parts, which lie apart in a row. The rows of decoding sequences are computed
one after the other, with what they keep; those of segments all at once, and another launch keeps their last
inputs, when nothing reads the sources any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.cuda.state_cells import (
    cell_at,
    cell_sizes,
    chain_start,
    chain_stop,
    goes_on,
    piece_of,
)
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates

COLUMNS = 128
"""Most channels of a program."""
ROWS = 16
"""Rows of a segment that a program computes."""


@dataclass(frozen=True, slots=True)
class ConvChannels:
    """The places of the channels of units. A row's parts begin at ``bases``."""

    units: int
    sizes: tuple[int, int, int]
    """Channels of a unit's parts."""
    bases: tuple[int, int, int]
    groups: int
    """Groups that the second and third parts are of: one or more of a unit, or of several units."""
    steps: tuple[int, int]
    """Channels of a group in these parts."""
    kept: int
    """The place of the kept inputs in a cell."""
    by_unit: bool
    """Whether weights and results are in the order of the units' channels, not in that of the rows."""
    gated: bool = False
    """Whether the input is the product of B and x, and the result is multiplied by C, whose rows are B, C and
    x; otherwise SiLU is applied."""

    @property
    def of_unit(self) -> int:
        return sum(self.sizes)

    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        parts = zip("012", self.sizes, self.bases, strict=True)
        return {
            **{
                f"{name}{part}": n
                for part, *pair in parts
                for name, n in zip(("PART", "BASE"), pair, strict=True)
            },
            "STEP1": self.steps[0],
            "STEP2": self.steps[1],
            "UNITS": self.units,
            "GROUPS": self.groups,
            "KEPT": self.kept,
            "BY_UNIT": self.by_unit,
            "GATED": self.gated,
        }


@triton.jit
def _places(
    unit: tl.tensor,
    channels: tl.tensor,
    PART0: tl.constexpr,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    BASE0: tl.constexpr,
    BASE1: tl.constexpr,
    BASE2: tl.constexpr,
    STEP1: tl.constexpr,
    STEP2: tl.constexpr,
    UNITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_UNIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The columns of a unit's channels in a row, and the places of their weights and results."""
    if PART1 == 0:
        columns = unit * PART0 + channels
        return columns + BASE0, columns
    group = unit * GROUPS // UNITS
    behind = tl.where(
        channels < PART0 + PART1,
        BASE1 + group * STEP1 + channels - PART0,
        BASE2 + group * STEP2 + channels - (PART0 + PART1),
    )
    columns = tl.where(channels < PART0, BASE0 + unit * PART0 + channels, behind)
    if BY_UNIT:
        return columns, unit * (PART0 + PART1 + PART2) + channels
    return columns, columns


@triton.jit
def _inputs(
    x: tl.tensor, places: tl.tensor, real: tl.tensor, ALL: tl.constexpr, GATED: tl.constexpr
) -> tl.tensor:
    own = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    if GATED:
        own *= tl.load(x + places + 2 * ALL, mask=real, other=0.0).to(tl.float32)
    return own


@triton.jit
def _finished(
    total: tl.tensor, x: tl.tensor, places: tl.tensor, real: tl.tensor, ALL: tl.constexpr, GATED: tl.constexpr
) -> tl.tensor:
    if GATED:
        return total * tl.load(x + places + ALL, mask=real, other=0.0).to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@bound
@triton.jit(
    do_not_specialize=["queries", "layer"],
    do_not_specialize_on_alignment=["x", "bias", "sources", "targets"],
)
def _convolve_decode(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    pages: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    queries: tl.tensor,
    layer: tl.tensor,
    width: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    PART0: tl.constexpr,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    BASE0: tl.constexpr,
    BASE1: tl.constexpr,
    BASE2: tl.constexpr,
    STEP1: tl.constexpr,
    STEP2: tl.constexpr,
    UNITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BY_UNIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    ALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The rows of one sequence, some channels of a unit."""
    sequence = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    channels = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    count = PART0 + PART1 + PART2
    real = channels < count
    columns, places = _places(
        unit, channels, PART0, PART1, PART2, BASE0, BASE1, BASE2, STEP1, STEP2, UNITS, GROUPS, BY_UNIT
    )
    taps = tl.arange(0, TILE)[:, None]
    kept = KEPT + taps * count + channels[None, :]
    has_tap = (taps < TAPS) & real[None, :]
    weights = tl.load(weight + taps * ALL + places[None, :], mask=has_tap, other=0.0)
    last = tl.load(weight + TAPS * ALL + places, mask=real, other=0.0)
    number = layer * UNITS + unit
    begun, place = cell_at(sources + sequence * width, number, page_stride, PER_PAGE, SIZE)
    for query in range(queries):
        row = sequence * queries + query
        named, target = cell_at(targets + row * width, number, page_stride, PER_PAGE, SIZE)
        if named:
            own = _inputs(x + row * row_stride, columns, real, ALL, GATED)
            total = own * last
            if HAS_BIAS:
                total += tl.load(bias + places, mask=real, other=0.0)
            if TAPS > 0:
                before = tl.load(pages + place + kept, mask=has_tap & begun, other=0.0)
                moved = tl.load(
                    pages + place + kept + count, mask=has_tap & (taps + 1 < TAPS) & begun, other=0.0
                )
                total += tl.sum(before * weights, 0)
                tl.debug_barrier()  # the target may be the source
                moved = tl.where(taps == TAPS - 1, own[None, :], moved)
                tl.store(pages + target + kept, moved, mask=has_tap)
                tl.debug_barrier()  # other threads may read what this one wrote
            y = _finished(total, x + row * row_stride, columns, real, ALL, GATED)
            tl.store(out + row * ALL + places, y, mask=real)
            begun = named
            place = target
        elif GATED:
            tl.store(out + row * ALL + places, tl.zeros([COLUMNS], tl.float32), mask=real)


@bound
@triton.jit(
    do_not_specialize=["first_row", "layer", "count"],
    do_not_specialize_on_alignment=["x", "bias", "sources", "targets", "starts"],
)
def _convolve_chunks(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    pages: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    first_row: tl.tensor,
    layer: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    PART0: tl.constexpr,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    BASE0: tl.constexpr,
    BASE1: tl.constexpr,
    BASE2: tl.constexpr,
    STEP1: tl.constexpr,
    STEP2: tl.constexpr,
    UNITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BY_UNIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """A piece of a segment, some channels of a unit. Inputs in front of the chain are in its source."""
    segment, begin, stop = piece_of(starts, count, tl.program_id(0), ROWS)
    if begin >= stop:
        return
    unit = tl.program_id(1)
    channels = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real = channels < PART0 + PART1 + PART2
    columns, places = _places(
        unit, channels, PART0, PART1, PART2, BASE0, BASE1, BASE2, STEP1, STEP2, UNITS, GROUPS, BY_UNIT
    )
    head = chain_start(sources, targets, width, segment, count)
    start = tl.load(starts + head)
    number = layer * UNITS + unit
    begun, place = cell_at(sources + head * width, number, page_stride, PER_PAGE, SIZE)
    kept = pages + place + KEPT
    rows = begin + tl.arange(0, ROWS)
    own = (rows < stop)[:, None] & real[None, :]
    row = (first_row + rows).to(tl.int64)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + places, mask=real, other=0.0)[None, :]
    for tap in tl.static_range(TAPS + 1):
        here = (rows - (TAPS - tap) >= start)[:, None]
        at = (row - (TAPS - tap)) * row_stride + columns[None, :]
        value = _inputs(x, at, own & here, ALL, GATED)
        if tap < TAPS:
            index = (rows - start + tap)[:, None] * (PART0 + PART1 + PART2) + channels[None, :]
            value += tl.load(kept + index, mask=own & (here == 0) & begun, other=0.0)
        total += tl.load(weight + tap * ALL + places, mask=real, other=0.0)[None, :] * value
    y = _finished(total, x, row * row_stride + columns[None, :], own, ALL, GATED)
    tl.store(out + row * ALL + places[None, :], y, mask=own)


@bound
@triton.jit(
    do_not_specialize=["first_row", "layer", "count"],
    do_not_specialize_on_alignment=["x", "sources", "targets", "starts"],
)
def _keep(
    x: tl.tensor,
    pages: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    starts: tl.tensor,
    first_row: tl.tensor,
    layer: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    PART0: tl.constexpr,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    BASE0: tl.constexpr,
    BASE1: tl.constexpr,
    BASE2: tl.constexpr,
    STEP1: tl.constexpr,
    STEP2: tl.constexpr,
    UNITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BY_UNIT: tl.constexpr,
    GATED: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    ALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The last inputs of a chain's segments, one after the other, some channels of a unit."""
    segment = tl.program_id(0)
    if goes_on(sources, targets, width, segment, count):
        return
    unit = tl.program_id(1)
    channels = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    size = PART0 + PART1 + PART2
    columns = _places(
        unit, channels, PART0, PART1, PART2, BASE0, BASE1, BASE2, STEP1, STEP2, UNITS, GROUPS, BY_UNIT
    )[0]
    taps = tl.arange(0, TILE)[:, None]
    has_tap = (taps < TAPS) & (channels < size)[None, :]
    kept = KEPT + taps * size + channels[None, :]
    number = layer * UNITS + unit
    begun, place = cell_at(sources + segment * width, number, page_stride, PER_PAGE, SIZE)
    for each in range(segment, chain_stop(sources, targets, width, segment, count)):
        start = tl.load(starts + each)
        stop = tl.load(starts + each + 1)
        target = cell_at(targets + each * width, number, page_stride, PER_PAGE, SIZE)[1]
        rows = stop - TAPS + taps
        row = (first_row + rows).to(tl.int64)
        own = _inputs(x, row * row_stride + columns[None, :], has_tap & (rows >= start), ALL, GATED)
        moved = pages + place + kept + (stop - start) * size
        own += tl.load(moved, mask=has_tap & (rows < start) & begun, other=0.0)
        tl.debug_barrier()  # the target may be the source
        tl.store(pages + target + kept, own, mask=has_tap)
        tl.debug_barrier()  # other threads may read what this one wrote
        begun = place == place
        place = target


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    channels: ConvChannels,
    states: LayerStates,
    rows: StateRows,
) -> Tensor:
    """x [T, ...], weight [conv_kernel, channels of all units] float32 -> [T, channels of all units] float32,
    where rows of padding hold anything, or 0 if the channels are gated. What is kept goes to the targets."""
    taps, every = weight.shape[0] - 1, weight.shape[1]
    out = torch.empty((len(x), every), dtype=torch.float32, device=x.device)
    columns = min(COLUMNS, next_power_of_two(channels.of_unit))
    constants = {**channels.constants(), "TAPS": taps, "ALL": every, "COLUMNS": columns, **cell_sizes(states)}
    tile = next_power_of_two(max(1, taps))
    blocks = (channels.units, triton.cdiv(channels.of_unit, columns))
    tensors, pages = (weight, weight if bias is None else bias), states.pages
    strides = pages.stride(0), x.stride(0)
    decoding = len(rows.decode_targets)
    if decoding:
        sequences, width = rows.decode_sources.shape
        _convolve_decode[(sequences, *blocks)](
            x, *tensors, pages, rows.decode_sources, rows.decode_targets, out,
            decoding // sequences, states.layer, width, *strides,
            **constants, HAS_BIAS=bias is not None, TILE=tile, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    if rows.segments:
        tables = rows.segment_tables
        places = tables.sources, tables.targets, tables.starts
        count, width = tables.sources.shape
        numbers = decoding, states.layer, count, width, *strides
        pieces = (len(x) - decoding) // ROWS + count
        _convolve_chunks[(pieces, *blocks)](
            x, *tensors, pages, *places, out, *numbers,
            **constants, HAS_BIAS=bias is not None, ROWS=ROWS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        if taps:
            _keep[(count, *blocks)](x, pages, *places, *numbers, **constants, TILE=tile, num_warps=4)
    return out


def short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, states: LayerStates, rows: StateRows
) -> Tensor:
    """See ``baton_kernels.causal_conv.short_conv``."""
    units, size = states.kv.units, weight.shape[1] // states.kv.units
    channels = ConvChannels(units, (size, 0, 0), (0, 0, 0), units, (0, 0), 0, by_unit=True, gated=True)
    return convolve(projected, weight, bias, channels, states, rows)
