"""Mamba-2 (see ``baton_kernels.mamba``) on CUDA tensors.

Decoding rows follow the recurrence, a head's state in the registers of one program. The tokens of a segment
are taken in blocks, by matmuls, one block after the other, and some rows of a head's state by each program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.causal_conv import ConvChannels, convolve
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import MIN_ROWS, next_power_of_two
from baton_kernels.cuda.state_cells import LEAST_LOG, cell_at, cell_sizes, chain_stop, softplus
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates

if TYPE_CHECKING:
    from baton_kernels.mamba_weights import GatedNorm, MambaWeights

BLOCK, SMALL_BLOCK = 32, 16
"""Tokens of a segment that are computed together, and those of exact products or large states."""
LARGE_STATE_DIM = 256
LARGEST_STATE = 16384
"""Most numbers of a head's state, with both sizes padded to powers of two."""
STATE_ROWS = 16
"""Rows of a head's state of a program that computes segments: more would take too many registers."""


@triton.jit
def _step(
    x: tl.tensor,
    head: tl.tensor,
    dt_bias: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
) -> tl.tensor:
    """The time steps of a head from their projections."""
    dt = softplus(x + tl.load(dt_bias + head))
    dt = tl.where(dt < least, least, dt)
    return tl.where(dt > most, most, dt)


@bound
@triton.jit(
    do_not_specialize=["queries", "layer"],
    do_not_specialize_on_alignment=["a_log", "d", "dt_bias", "sources", "targets"],
)
def _advance_heads(
    projected: tl.tensor,
    mixed: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    dt_bias: tl.tensor,
    pages: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    queries: tl.tensor,
    layer: tl.tensor,
    width: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    STEPS: tl.constexpr,
    UNITS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    STATE: tl.constexpr,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The rows of one sequence, one head."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    unit = head // HEADS
    own = head % HEADS
    dims = tl.arange(0, DIMS)
    cols = tl.arange(0, STATE)
    has_dim = dims < HEAD_DIM
    has_col = cols < STATE_DIM
    real = has_dim[:, None] & has_col[None, :]
    numbers = own * HEAD_DIM * STATE_DIM + dims[:, None] * STATE_DIM + cols[None, :]
    number = layer * UNITS + unit
    begun, place = cell_at(sources + sequence * width, number, page_stride, PER_PAGE, SIZE)
    state = tl.load(pages + place + numbers, mask=real & begun, other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    size: tl.constexpr = HEADS * HEAD_DIM
    all_groups: tl.constexpr = GROUPS * STATE_DIM
    of_group = size + own * GROUPS // HEADS * STATE_DIM + cols
    for query in range(queries):
        row = sequence * queries + query
        named, target = cell_at(targets + row * width, number, page_stride, PER_PAGE, SIZE)
        y = tl.zeros([DIMS], tl.float32)
        if named:
            unit_row = mixed + (row * UNITS + unit) * (size + 2 * all_groups)
            x = tl.load(projected + row * row_stride + STEPS + head).to(tl.float32)
            dt = _step(x, head, dt_bias, least, most)
            x = tl.load(unit_row + own * HEAD_DIM + dims, mask=has_dim, other=0.0)
            b = tl.load(unit_row + of_group, mask=has_col, other=0.0)
            c = tl.load(unit_row + all_groups + of_group, mask=has_col, other=0.0)
            state = state * tl.exp(-rate * dt) + (dt * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + tl.load(d + head) * x
            tl.store(pages + target + numbers, state, mask=real)
        tl.store(out + row * (UNITS * size) + head * HEAD_DIM + dims, y, mask=has_dim)


@bound
@triton.jit(
    do_not_specialize=["first_row", "layer", "count"],
    do_not_specialize_on_alignment=["a_log", "d", "dt_bias", "sources", "targets", "starts"],
)
def _scan_heads(
    projected: tl.tensor,
    mixed: tl.tensor,
    a_log: tl.tensor,
    d: tl.tensor,
    dt_bias: tl.tensor,
    pages: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    first_row: tl.tensor,
    layer: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    STEPS: tl.constexpr,
    UNITS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    STATE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The segments of a chain, some rows of one head's state."""
    segment = tl.program_id(0)
    end = chain_stop(sources, targets, width, segment, count)
    if end == segment:
        return
    head = tl.program_id(1)
    unit = head // HEADS
    own = head % HEADS
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    cols = tl.arange(0, STATE)
    has_dim = (dims < HEAD_DIM)[None, :]
    has_col = (cols < STATE_DIM)[None, :]
    real = (dims < HEAD_DIM)[:, None] & has_col
    numbers = own * HEAD_DIM * STATE_DIM + dims[:, None] * STATE_DIM + cols[None, :]
    number = layer * UNITS + unit
    begun, place = cell_at(sources + segment * width, number, page_stride, PER_PAGE, SIZE)
    state = tl.load(pages + place + numbers, mask=real & begun, other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    size: tl.constexpr = HEADS * HEAD_DIM
    all_groups: tl.constexpr = GROUPS * STATE_DIM
    of_group = size + own * GROUPS // HEADS * STATE_DIM + cols
    lanes = tl.arange(0, ROWS)
    lower = lanes[:, None] >= lanes[None, :]
    for each in range(segment, end):
        stop = tl.load(starts + each + 1)
        for begin in range(tl.load(starts + each), stop, ROWS):
            rows = begin + lanes
            here = rows < stop
            row = (first_row + rows).to(tl.int64)
            unit_rows = mixed + ((row * UNITS + unit) * (size + 2 * all_groups))[:, None]
            b = tl.load(unit_rows + of_group[None, :], mask=here[:, None] & has_col, other=0.0)
            c = tl.load(unit_rows + all_groups + of_group[None, :], mask=here[:, None] & has_col, other=0.0)
            dt = tl.load(projected + row * row_stride + STEPS + head, mask=here, other=0.0)
            dt = tl.where(here, _step(dt.to(tl.float32), head, dt_bias, least, most), 0.0)
            log = tl.maximum(-rate * dt, LEAST_LOG)
            sums = tl.cumsum(log, 0)
            total = tl.sum(log, 0)
            between = tl.where(lower, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * between * dt[None, :]
            tl.debug_barrier()  # or what follows would take registers already
            y = tl.dot(c, tl.trans(state), input_precision=PRECISION) * tl.exp(sums)[:, None]
            x = tl.load(unit_rows + own * HEAD_DIM + dims[None, :], mask=here[:, None] & has_dim, other=0.0)
            y = tl.dot(scores, x, y, input_precision=PRECISION) + tl.load(d + head) * x
            to = out + (row * (UNITS * size))[:, None] + head * HEAD_DIM + dims[None, :]
            tl.store(to, y, mask=here[:, None] & has_dim)
            tl.debug_barrier()
            b = tl.load(unit_rows + of_group[None, :], mask=here[:, None] & has_col, other=0.0)
            # A sum in another order may be a little larger than the last of the running ones.
            weights = tl.exp(tl.minimum(total - sums, 0.0)) * dt
            added = tl.trans(x * weights[:, None])
            state = tl.dot(added, b, state * tl.exp(total), input_precision=PRECISION)
        target = cell_at(targets + each * width, number, page_stride, PER_PAGE, SIZE)[1]
        tl.store(pages + target + numbers, state, mask=real)


def mamba(
    projected: Tensor, weights: MambaWeights, sizes: MambaSizes, states: LayerStates, rows: StateRows
) -> Tensor:
    """See ``baton_kernels.mamba.mamba``."""
    dims, state = (max(MIN_ROWS, next_power_of_two(n)) for n in (sizes.head_dim, sizes.state_dim))
    if dims * state > LARGEST_STATE:
        raise ValueError(f"a head's state is {sizes.head_dim} x {sizes.state_dim}: at most {LARGEST_STATE}")
    mixed = convolve(projected, weights.conv.weight, weights.conv.bias, _channels(sizes), states, rows)
    heads = sizes.units * sizes.heads
    out = torch.empty((len(projected), sizes.inner), dtype=torch.float32, device=projected.device)
    constants = {
        "STEPS": sizes.columns - heads,
        "UNITS": sizes.units,
        "HEADS": sizes.heads,
        "GROUPS": sizes.unit_groups,
        "HEAD_DIM": sizes.head_dim,
        "STATE_DIM": sizes.state_dim,
        "STATE": state,
        **cell_sizes(states),
    }
    tensors = projected, mixed, weights.a_log, weights.d, weights.dt_bias, states.pages
    strides = states.pages.stride(0), projected.stride(0)
    decoding = len(rows.decode_targets)
    if decoding:
        sequences, width = rows.decode_sources.shape
        _advance_heads[(sequences, heads)](
            *tensors, rows.decode_sources, rows.decode_targets, out, *weights.dt_limits,
            decoding // sequences, states.layer, width, *strides,
            **constants, DIMS=dims, num_warps=max(1, dims * state // 1024), enable_fp_fusion=True,
        )  # fmt: skip
    if rows.segments:
        tables = rows.segment_tables
        count, width = tables.sources.shape
        exact = projected.dtype == torch.float32
        small = exact or state >= LARGE_STATE_DIM
        _scan_heads[(count, heads, dims // STATE_ROWS)](
            *tensors, tables.sources, tables.targets, tables.starts, out, *weights.dt_limits,
            decoding, states.layer, count, width, *strides,
            **constants, DIMS=STATE_ROWS, ROWS=SMALL_BLOCK if small else BLOCK,
            PRECISION="ieee" if exact else "tf32", num_warps=8, num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _channels(sizes: MambaSizes) -> ConvChannels:
    groups = sizes.groups * sizes.state_dim
    return ConvChannels(
        units=sizes.units,
        sizes=sizes.channels,
        bases=(sizes.inner, 2 * sizes.inner, 2 * sizes.inner + groups),
        groups=sizes.groups,
        steps=(sizes.state_dim, sizes.state_dim),
        kept=sizes.state_size,
        by_unit=True,
    )


@bound
@triton.jit(do_not_specialize_on_alignment=["gate", "squares"])
def _gated_norm(
    y: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    squares: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    whole: tl.tensor,
    y_stride: tl.tensor,
    gate_stride: tl.tensor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    GATE_FIRST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    lanes = tl.arange(0, TILE)
    real = lanes < SIZE
    columns = group * SIZE + lanes
    x = tl.load(y + row * y_stride + columns, mask=real, other=0.0)
    z = tl.load(gate + row * gate_stride + columns, mask=real, other=0.0).to(tl.float32)
    opened = z / (1.0 + tl.exp(-z))
    if GATE_FIRST or not HAS_NORM:
        x *= opened
    if HAS_NORM:
        if HAS_SQUARES:
            total = tl.load(squares + row * GROUPS + group)
        else:
            total = tl.sum(x * x, 0)
        x *= tl.rsqrt(total / whole + eps) * tl.load(weight + columns, mask=real, other=0.0)
        if not GATE_FIRST:
            x *= opened
    tl.store(out + row * (GROUPS * SIZE) + columns, x.to(out.dtype.element_ty), mask=real)


def gated_norm(
    y: Tensor, gate: Tensor, norm: GatedNorm, dtype: torch.dtype, squares: Tensor | None
) -> Tensor:
    """See ``baton_kernels.mamba.gated_norm``."""
    rows, numbers = y.shape
    if y.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError(f"rows must be contiguous, not strided by {y.stride(1)}, {gate.stride(1)}")
    out = torch.empty((rows, numbers), dtype=dtype, device=y.device)
    if rows:
        size = numbers // norm.groups
        tile = next_power_of_two(size)
        _gated_norm[(rows, norm.groups)](
            y,
            gate,
            y if norm.weight is None else norm.weight,
            y if squares is None else squares.contiguous(),
            out,
            norm.eps,
            norm.size,
            y.stride(0),
            gate.stride(0),
            GROUPS=norm.groups,
            SIZE=size,
            TILE=tile,
            HAS_NORM=norm.weight is not None,
            HAS_SQUARES=squares is not None,
            GATE_FIRST=norm.gate_first,
            num_warps=min(16, max(1, tile // 512)),
            enable_fp_fusion=True,
        )
    return out
