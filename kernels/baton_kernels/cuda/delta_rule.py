"""Linear attention (see ``baton_kernels.delta_rule``) on CUDA tensors.

Decoding rows follow the recurrence, a head's state in the registers of one program. Segments are cut into
pieces. What a piece's tokens are to each other is worked out for all pieces at once: the products of queries
and keys, and for the delta rule the solution of its triangular system (the UT transform,
https://arxiv.org/abs/2406.06484). One program for some columns of a head's state then takes it through the
pieces of a chunk, by matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.causal_conv import ConvChannels, convolve
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import MIN_ROWS, next_power_of_two
from baton_kernels.cuda.state_cells import (
    LEAST_LOG,
    cell_at,
    cell_sizes,
    chain_stop,
    piece_of,
    softplus,
)
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates

PIECE, SMALL_PIECE = 32, 16
"""Tokens of a piece, and of one of exact products or with a decay for each channel."""
LARGEST_STATE = 16384
"""Most numbers of a head's state, with both sizes padded to powers of two."""
STATE_COLUMNS = 16
"""Columns of a head's state of a program that computes segments: more would take too many registers."""
CHANNEL_COLUMNS = 64
"""Columns of a head's state of a program that decodes a part of it."""
WHOLE_STATE = 8192
"""Most numbers of a head's state that one program decodes."""
FINISHED_ROWS = 8
"""Rows of a head that are normed by a program."""
UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def _log_decay(x: tl.tensor, rate: tl.tensor, lower_bound: tl.tensor, BOUNDED: tl.constexpr) -> tl.tensor:
    if BOUNDED:
        return lower_bound * tl.sigmoid(rate * x)
    return -rate * softplus(x)


@triton.jit
def _gated(x: tl.tensor, gate: tl.tensor, SIGMOID: tl.constexpr) -> tl.tensor:
    opened = tl.sigmoid(gate)
    if not SIGMOID:
        opened *= gate
    return x * opened


@triton.jit
def _lengths(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """What makes the vectors along AXIS of length 1."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + UNIT_EPS)


@bound
@triton.jit(
    do_not_specialize=["queries", "layer"],
    do_not_specialize_on_alignment=["decay", "beta", "gate", "a_log", "dt_bias", "sources", "targets"],
)
def _advance_heads(
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    gate: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    norm: tl.tensor,
    pages: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    lower_bound: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    queries: tl.tensor,
    layer: tl.tensor,
    width: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    decay_stride: tl.tensor,
    beta_stride: tl.tensor,
    gate_stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_BETA: tl.constexpr,
    UNIT_VECTORS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The rows of one sequence, one value head or, if nothing is normed, some columns of its state."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    unit = head // SHARED
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_key = keys < KEY_DIM
    has_value = values < VALUE_DIM
    real = has_key[:, None] & has_value[None, :]
    numbers = head % SHARED * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    number = layer * KEY_HEADS + unit
    begun, place = cell_at(sources + sequence * width, number, page_stride, PER_PAGE, SIZE)
    state = tl.load(pages + place + numbers, mask=real & begun, other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    for query in range(queries):
        row = sequence * queries + query
        named, target = cell_at(targets + row * width, number, page_stride, PER_PAGE, SIZE)
        y = tl.zeros([VALUES], tl.float32)
        if named:
            own = mixed + row * row_stride
            q = tl.load(own + unit * KEY_DIM + keys, mask=has_key, other=0.0).to(tl.float32)
            k = tl.load(own + (KEY_HEADS + unit) * KEY_DIM + keys, mask=has_key, other=0.0).to(tl.float32)
            v = tl.load(own + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values, mask=has_value, other=0.0)
            change = v.to(tl.float32)
            if UNIT_VECTORS:
                q *= _lengths(q, 0)
                k *= _lengths(k, 0)
            if BY_CHANNEL:
                x = tl.load(decay + row * decay_stride + head * KEY_DIM + keys, mask=has_key, other=0.0)
                x = x.to(tl.float32)
                if HAS_DT_BIAS:
                    x += tl.load(dt_bias + head * KEY_DIM + keys, mask=has_key, other=0.0)
                state *= tl.exp(_log_decay(x, rate, lower_bound, BOUNDED))[:, None]
            elif HAS_DECAY:
                x = tl.load(decay + row * decay_stride + head).to(tl.float32)
                if HAS_DT_BIAS:
                    x += tl.load(dt_bias + head)
                state *= tl.exp(_log_decay(x, rate, lower_bound, BOUNDED))
            else:
                state *= tl.exp(-rate)
            if HAS_BETA:
                change -= tl.sum(k[:, None] * state, 0)
                change *= tl.sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
            state += k[:, None] * change[None, :]
            y = tl.sum((q * scale)[:, None] * state, 0)
            tl.store(pages + target + numbers, state, mask=real)
            if HAS_NORM:
                y *= tl.rsqrt(tl.sum(y * y, 0) / VALUE_DIM + eps)
                y *= tl.load(norm + values, mask=has_value, other=0.0)
            if HAS_GATE:
                z = tl.load(gate + row * gate_stride + head * VALUE_DIM + values, mask=has_value, other=0.0)
                y = _gated(y, z.to(tl.float32), SIGMOID)
        place = row * (KEY_HEADS * SHARED * VALUE_DIM) + head * VALUE_DIM
        tl.store(out + place + values, y.to(out.dtype.element_ty), mask=has_value)


@triton.jit
def _inverse(lower: tl.tensor, ROWS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """The inverse of 1 + lower, [ROWS, ROWS], below whose diagonal alone there is something.

    Blocks of 16 rows on the diagonal are solved row by row, all at once. With D the inverse of these and y
    what D makes of the blocks below them, y to the power of the number of blocks is 0."""
    BLOCKS: tl.constexpr = ROWS // 16
    lanes = tl.arange(0, ROWS)
    same = (lanes // 16)[:, None] == (lanes // 16)[None, :]
    few = tl.arange(0, 16)
    diagonal = tl.reshape(tl.where(same, lower, 0.0), [BLOCKS, 16, BLOCKS, 16])
    diagonal = tl.sum(diagonal, 2)
    solved = -diagonal
    for i in range(1, 16):
        at = (few == i)[None, :, None]
        row = tl.sum(tl.where(at, -diagonal, 0.0), 1)
        row += tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(at, row[:, None, :], solved)
    solved += tl.where(few[:, None] == few[None, :], 1.0, 0.0)[None, :, :]
    if BLOCKS == 1:
        return tl.reshape(solved, [ROWS, ROWS])
    wide = tl.broadcast_to(solved[:, :, None, :], [BLOCKS, 16, BLOCKS, 16])
    inverse = tl.where(same, tl.reshape(wide, [ROWS, ROWS]), 0.0)
    y = tl.dot(inverse, tl.where(same, 0.0, lower), input_precision=PRECISION)
    found = inverse - tl.dot(y, inverse, input_precision=PRECISION)
    if BLOCKS > 2:
        y = tl.dot(y, y, input_precision=PRECISION)
        found = tl.dot(y, found, found, input_precision=PRECISION)
    tl.static_assert(BLOCKS <= 4)
    return found


@bound
@triton.jit(
    do_not_specialize=["first_row", "count"],
    do_not_specialize_on_alignment=["decay", "beta", "a_log", "dt_bias", "starts"],
)
def _relate(
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    starts: tl.tensor,
    fading: tl.tensor,
    scores: tl.tensor,
    known: tl.tensor,
    wanted: tl.tensor,
    lower_bound: tl.tensor,
    scale: tl.tensor,
    first_row: tl.tensor,
    count: tl.tensor,
    row_stride: tl.tensor,
    decay_stride: tl.tensor,
    beta_stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_BETA: tl.constexpr,
    UNIT_VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One piece's tokens of one value head: the running sums of the decays' logarithms (``fading``), the
    products of queries and keys (``scores``), and T beta k (``known``) and T beta v (``wanted``), where T
    solves the delta rule's system. A change of the state is then what is wanted less what it knows."""
    _, begin, stop = piece_of(starts, count, tl.program_id(0), ROWS)
    if begin >= stop:
        return
    head = tl.program_id(1)
    unit = head // SHARED
    heads: tl.constexpr = KEY_HEADS * SHARED
    lanes = tl.arange(0, ROWS)
    here = begin + lanes < stop
    place = (begin + lanes).to(tl.int64) * heads + head  # of what is written, [rows, heads]
    row = (first_row + begin + lanes).to(tl.int64)
    keys = tl.arange(0, KEYS)
    values = tl.arange(0, VALUES)
    has_key = here[:, None] & (keys < KEY_DIM)[None, :]
    own = mixed + (row * row_stride)[:, None]
    q = tl.load(own + unit * KEY_DIM + keys[None, :], mask=has_key, other=0.0).to(tl.float32)
    k = tl.load(own + (KEY_HEADS + unit) * KEY_DIM + keys[None, :], mask=has_key, other=0.0).to(tl.float32)
    if UNIT_VECTORS:
        q *= _lengths(q, 1)[:, None]
        k *= _lengths(k, 1)[:, None]
    q *= scale
    rate = tl.exp(tl.load(a_log + head))
    if HAS_BETA:
        strength = tl.load(beta + row * beta_stride + head, mask=here, other=0.0).to(tl.float32)
        strength = tl.where(here, tl.sigmoid(strength), 0.0)
    if BY_CHANNEL:
        x = tl.load(
            decay + (row * decay_stride)[:, None] + head * KEY_DIM + keys[None, :], mask=has_key, other=0.0
        )
        x = x.to(tl.float32)
        if HAS_DT_BIAS:
            x += tl.load(dt_bias + head * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)[None, :]
        log = tl.where(has_key, _log_decay(x, rate, lower_bound, BOUNDED), 0.0)
        sums = tl.cumsum(tl.maximum(log, LEAST_LOG), 0)
        tl.store(fading + place[:, None] * KEY_DIM + keys[None, :], sums, mask=has_key)
        seen = tl.zeros([ROWS, ROWS], tl.float32)
        alike = tl.zeros([ROWS, ROWS], tl.float32)
        for other in range(ROWS):
            at = (lanes == other)[:, None]
            faded = tl.sum(tl.where(at, sums, 0.0), 0)[None, :]
            faded = tl.exp(tl.minimum(sums - faded, 0.0)) * tl.sum(tl.where(at, k, 0.0), 0)[None, :]
            column = (lanes == other)[None, :]
            seen = tl.where(column, tl.sum(q * faded, 1)[:, None], seen)
            if HAS_BETA:
                alike = tl.where(column, tl.sum(k * faded, 1)[:, None], alike)
        fade = tl.exp(sums)
    else:
        if HAS_DECAY:
            x = tl.load(decay + row * decay_stride + head, mask=here, other=0.0).to(tl.float32)
            if HAS_DT_BIAS:
                x += tl.load(dt_bias + head)
            log = _log_decay(x, rate, lower_bound, BOUNDED)
        else:
            log = tl.zeros([ROWS], tl.float32) - rate
        sums = tl.cumsum(tl.where(here, tl.maximum(log, LEAST_LOG), 0.0), 0)
        tl.store(fading + place, sums, mask=here)
        between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        if HAS_BETA:
            alike = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
            fade = tl.exp(sums)[:, None]
    seen = tl.where(lanes[:, None] >= lanes[None, :], seen, 0.0)
    tl.store(scores + place[:, None] * ROWS + lanes[None, :], seen, mask=here[:, None])
    if HAS_BETA:
        tl.debug_barrier()  # or what is read below would take registers above
        below = lanes[:, None] > lanes[None, :]
        inverse = _inverse(tl.where(below, alike * strength[:, None], 0.0), ROWS, PRECISION)
        # The columns of T times beta, which goes with either operand.
        inverse *= strength[None, :]
        # Read once more, or it would take registers meanwhile.
        k = tl.load(own + (KEY_HEADS + unit) * KEY_DIM + keys[None, :], mask=has_key, other=0.0)
        k = k.to(tl.float32)
        if UNIT_VECTORS:
            k *= _lengths(k, 1)[:, None]
        tl.store(
            known + place[:, None] * KEY_DIM + keys[None, :],
            tl.dot(inverse, k * fade, input_precision=PRECISION),
            mask=has_key,
        )
        has_value = here[:, None] & (values < VALUE_DIM)[None, :]
        at = own + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values[None, :]
        v = tl.load(at, mask=has_value, other=0.0).to(tl.float32)
        tl.store(
            wanted + place[:, None] * VALUE_DIM + values[None, :],
            tl.dot(inverse, v, input_precision=PRECISION),
            mask=has_value,
        )


@bound
@triton.jit(
    do_not_specialize=["first_row", "layer", "count"],
    do_not_specialize_on_alignment=["sources", "targets", "starts"],
)
def _scan_heads(
    mixed: tl.tensor,
    fading: tl.tensor,
    scores: tl.tensor,
    known: tl.tensor,
    wanted: tl.tensor,
    pages: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    first_row: tl.tensor,
    layer: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    UNIT_VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PER_PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The segments of a chain, some columns of one value head's state. Writes what queries read."""
    segment = tl.program_id(0)
    end = chain_stop(sources, targets, width, segment, count)
    if end == segment:
        return
    head = tl.program_id(1)
    unit = head // SHARED
    heads: tl.constexpr = KEY_HEADS * SHARED
    lanes = tl.arange(0, ROWS)
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real_key = keys < KEY_DIM
    real_column = columns < VALUE_DIM
    real = real_key[:, None] & real_column[None, :]
    numbers = head % SHARED * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + columns[None, :]
    number = layer * KEY_HEADS + unit
    begun, cell = cell_at(sources + segment * width, number, page_stride, PER_PAGE, SIZE)
    state = tl.load(pages + cell + numbers, mask=real & begun, other=0.0)
    for each in range(segment, end):
        stop = tl.load(starts + each + 1)
        for begin in range(tl.load(starts + each), stop, ROWS):
            here = begin + lanes < stop
            has_key = here[:, None] & real_key[None, :]
            has_column = here[:, None] & real_column[None, :]
            place = (begin + lanes).to(tl.int64) * heads + head
            last = (tl.minimum(begin + ROWS, stop) - 1).to(tl.int64) * heads + head
            own = mixed + ((first_row + begin + lanes).to(tl.int64) * row_stride)[:, None]
            if HAS_BETA:
                w = tl.load(known + place[:, None] * KEY_DIM + keys[None, :], mask=has_key, other=0.0)
                change = tl.load(
                    wanted + place[:, None] * VALUE_DIM + columns[None, :], mask=has_column, other=0.0
                )
                change -= tl.dot(w, state, input_precision=PRECISION)
                tl.debug_barrier()  # or what is read below would take registers above
            else:
                at = own + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns[None, :]
                change = tl.load(at, mask=has_column, other=0.0).to(tl.float32)
            q = tl.load(own + unit * KEY_DIM + keys[None, :], mask=has_key, other=0.0).to(tl.float32)
            if UNIT_VECTORS:
                q *= _lengths(q, 1)[:, None]
            if BY_CHANNEL:
                sums = tl.load(fading + place[:, None] * KEY_DIM + keys[None, :], mask=has_key, other=0.0)
                total = tl.load(fading + last * KEY_DIM + keys, mask=real_key, other=0.0)
                q *= tl.exp(sums) * scale
                left = tl.exp(tl.minimum(total[None, :] - sums, 0.0))
                kept = tl.exp(total)[:, None]
            else:
                sums = tl.load(fading + place, mask=here, other=0.0)
                total = tl.load(fading + last)
                q *= (tl.exp(sums) * scale)[:, None]
                left = tl.exp(tl.minimum(total - sums, 0.0))[:, None]
                kept = tl.exp(total)
            y = tl.dot(q, state, input_precision=PRECISION)
            seen = tl.load(scores + place[:, None] * ROWS + lanes[None, :], mask=here[:, None], other=0.0)
            y = tl.dot(seen, change, y, input_precision=PRECISION)
            tl.store(out + place[:, None] * VALUE_DIM + columns[None, :], y, mask=has_column)
            tl.debug_barrier()
            k = tl.load(own + (KEY_HEADS + unit) * KEY_DIM + keys[None, :], mask=has_key, other=0.0).to(
                tl.float32
            )
            if UNIT_VECTORS:
                k *= _lengths(k, 1)[:, None]
            state = tl.dot(tl.trans(k * left), change, state * kept, input_precision=PRECISION)
        target = cell_at(targets + each * width, number, page_stride, PER_PAGE, SIZE)[1]
        tl.store(pages + target + numbers, state, mask=real)


@bound
@triton.jit(do_not_specialize=["first_row", "count"], do_not_specialize_on_alignment=["gate"])
def _finish(
    found: tl.tensor,
    gate: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    first_row: tl.tensor,
    count: tl.tensor,
    gate_stride: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """The norm and the gate of some of ``count`` rows of one head."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    values = tl.arange(0, VALUES)
    real = (rows < count)[:, None] & (values < VALUE_DIM)[None, :]
    columns = tl.program_id(1) * VALUE_DIM + values[None, :]
    y = tl.load(found + rows.to(tl.int64)[:, None] * (HEADS * VALUE_DIM) + columns, mask=real, other=0.0)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(y * y, 1) / VALUE_DIM + eps)[:, None]
        y *= tl.load(norm + values, mask=values < VALUE_DIM, other=0.0)[None, :]
    row = (first_row + rows).to(tl.int64)[:, None]
    if HAS_GATE:
        z = tl.load(gate + row * gate_stride + columns, mask=real, other=0.0)
        y = _gated(y, z.to(tl.float32), SIGMOID)
    tl.store(out + row * (HEADS * VALUE_DIM) + columns, y.to(out.dtype.element_ty), mask=real)


def linear_attention(layer: DeltaLayer, inputs: DeltaInputs, states: LayerStates, rows: StateRows) -> Tensor:
    """See ``baton_kernels.delta_rule.linear_attention``."""
    return _Call.of(layer, inputs, states, rows).compute()


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's computation in a step."""

    layer: DeltaLayer
    inputs: DeltaInputs
    states: LayerStates
    rows: StateRows
    mixed: Tensor
    """[T, channels]: the queries of all heads, the keys, the values, behind the convolutions."""

    @classmethod
    def of(cls, layer: DeltaLayer, inputs: DeltaInputs, states: LayerStates, rows: StateRows) -> _Call:
        given = [inputs.qkv, inputs.decay, inputs.beta, inputs.gate]
        strides = [x.stride(1) for x in given if x is not None and x.shape[1] > 1]
        if any(stride != 1 for stride in strides):
            raise ValueError(f"strides {strides}: the numbers of a row lie side by side")
        keys, values = _padded(layer.key_dim), _padded(layer.value_dim)
        if keys * values > LARGEST_STATE:
            raise ValueError(
                f"a head's state is {layer.key_dim} x {layer.value_dim}: at most {LARGEST_STATE}"
            )
        if layer.conv is None:
            return cls(layer, inputs, states, rows, inputs.qkv)
        mixed = convolve(inputs.qkv, layer.conv, None, _channels(layer), states, rows)
        return cls(layer, inputs, states, rows, mixed)

    def compute(self) -> Tensor:
        layer, qkv = self.layer, self.inputs.qkv
        shape = len(qkv), layer.value_heads * layer.value_dim
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        if len(self.rows.decode_targets):
            self._decode(out)
        if self.rows.segments:
            self._chunks(out)
        return out

    def _decode(self, out: Tensor) -> None:
        layer, inputs, rows = self.layer, self.inputs, self.rows
        sequences, width = rows.decode_sources.shape
        keys, values = _padded(layer.key_dim), _padded(layer.value_dim)
        # Large states and decays of channels take registers: some columns at a time, the norm behind them.
        split, found, finishing = self._by_channel or keys * values > WHOLE_STATE, out, self._finishing()
        if split:
            values, found = (
                min(values, CHANNEL_COLUMNS),
                self._memory(len(rows.decode_targets) * out.shape[1]),
            )
            finishing |= {"HAS_NORM": False, "HAS_GATE": False}
        _advance_heads[(sequences, layer.value_heads, triton.cdiv(layer.value_dim, values))](
            self.mixed, *map(self._or_unused, (inputs.decay, inputs.beta, inputs.gate)),
            layer.a_log, self._or_unused(layer.dt_bias), self._or_unused(layer.norm),
            self.states.pages, rows.decode_sources, rows.decode_targets, found,
            layer.lower_bound or 0.0, layer.query_scale, layer.eps,
            len(rows.decode_targets) // sequences, self.states.layer, width, self.states.pages.stride(0),
            self.mixed.stride(0), *map(_row_stride, (inputs.decay, inputs.beta, inputs.gate)),
            **self._constants(), **self._decays(), **finishing, **cell_sizes(self.states),
            KEYS=keys, VALUES=values, num_warps=max(1, keys * values // 1024), enable_fp_fusion=True,
        )  # fmt: skip
        if split:
            self._finish_rows(found, out, 0, len(rows.decode_targets))

    def _chunks(self, out: Tensor) -> None:
        layer, inputs, states = self.layer, self.inputs, self.states
        tables, first = self.rows.segment_tables, len(self.rows.decode_targets)
        count, width = tables.sources.shape
        length, heads = len(out) - first, layer.value_heads
        exact = inputs.qkv.dtype == torch.float32
        piece = SMALL_PIECE if exact or self._by_channel else PIECE
        sizes = (layer.key_dim if self._by_channel else 1, piece, layer.key_dim, layer.value_dim)
        corrects = inputs.beta is not None
        made = [self._memory(length * heads * n) for n in (sizes if corrects else sizes[:2])]
        fading, scores, known, wanted = made if corrects else [*made, *made]
        found = self._memory(length * heads * layer.value_dim)
        constants = {**self._constants(), "ROWS": piece, "PRECISION": "ieee" if exact else "tf32"}
        _relate[(length // piece + count, heads)](
            self.mixed, *map(self._or_unused, (inputs.decay, inputs.beta)),
            layer.a_log, self._or_unused(layer.dt_bias), tables.starts, fading, scores, known, wanted,
            layer.lower_bound or 0.0, layer.query_scale, first, count, self.mixed.stride(0),
            *map(_row_stride, (inputs.decay, inputs.beta)),
            **constants, **self._decays(), KEYS=_padded(layer.key_dim), VALUES=_padded(layer.value_dim),
            num_warps=8, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        columns = min(STATE_COLUMNS, _padded(layer.value_dim))
        _scan_heads[(count, heads, triton.cdiv(layer.value_dim, columns))](
            self.mixed, fading, scores, known, wanted, states.pages, tables.sources, tables.targets,
            tables.starts, found, layer.query_scale, first, states.layer, count, width,
            states.pages.stride(0), self.mixed.stride(0),
            **constants, **cell_sizes(states), BY_CHANNEL=self._by_channel, KEYS=_padded(layer.key_dim),
            COLUMNS=columns, num_warps=8, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        self._finish_rows(found, out, first, length)

    def _finish_rows(self, found: Tensor, out: Tensor, first: int, count: int) -> None:
        """The norm and the gate of ``count`` rows of ``out`` from ``first`` on."""
        layer, inputs, heads = self.layer, self.inputs, self.layer.value_heads
        _finish[(triton.cdiv(count, FINISHED_ROWS), heads)](
            found, self._or_unused(inputs.gate), self._or_unused(layer.norm), out, layer.eps, first, count,
            _row_stride(inputs.gate),
            HEADS=heads, VALUE_DIM=layer.value_dim, VALUES=_padded(layer.value_dim), ROWS=FINISHED_ROWS,
            **self._finishing(), num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip

    @property
    def _by_channel(self) -> bool:
        return self.inputs.decay is not None and self.inputs.decay.shape[1] != self.layer.value_heads

    def _memory(self, numbers: int) -> Tensor:
        return torch.empty(numbers, dtype=torch.float32, device=self.mixed.device)

    def _or_unused(self, tensor: Tensor | None) -> Tensor:
        """The tensor, or what stands in its place."""
        return self.mixed if tensor is None else tensor

    def _constants(self) -> dict[str, int]:
        layer = self.layer
        return {
            "KEY_HEADS": layer.key_heads,
            "SHARED": layer.shared,
            "KEY_DIM": layer.key_dim,
            "VALUE_DIM": layer.value_dim,
            "HAS_BETA": self.inputs.beta is not None,
            "UNIT_VECTORS": layer.unit_vectors,
        }

    def _decays(self) -> dict[str, bool]:
        return {
            "HAS_DECAY": self.inputs.decay is not None,
            "BY_CHANNEL": self._by_channel,
            "HAS_DT_BIAS": self.layer.dt_bias is not None,
            "BOUNDED": self.layer.lower_bound is not None,
        }

    def _finishing(self) -> dict[str, bool]:
        return {
            "HAS_NORM": self.layer.norm is not None,
            "HAS_GATE": self.inputs.gate is not None,
            "SIGMOID": self.layer.gate == "sigmoid",
        }


def _channels(layer: DeltaLayer) -> ConvChannels:
    keys, values = layer.key_heads * layer.key_dim, layer.shared * layer.value_dim
    return ConvChannels(
        units=layer.key_heads,
        sizes=(layer.key_dim, layer.key_dim, values),
        bases=(0, keys, 2 * keys),
        groups=layer.key_heads,
        steps=(layer.key_dim, values),
        kept=layer.shared * layer.key_dim * layer.value_dim,
        by_unit=False,
    )


def _padded(size: int) -> int:
    return max(MIN_ROWS, next_power_of_two(size))


def _row_stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
