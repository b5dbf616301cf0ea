"""Experts of any number of pairs of a token and an expert.

The pairs are sorted by expert, and multiplied in tiles of pairs of one expert. Where an expert's tiles begin
follows from where its pairs do (``tiles.last_at_most``), which leaves up to one tile for each expert without
any pairs: its programs end at once. Each pair's result goes to its own place, and a token's are added in the
order of its experts. Nothing depends on who arrived when.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.activation import gated
from baton_kernels.cuda.expert_shapes import ExpertStep
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.tiles import last_at_most
from baton_kernels.cuda.tuned import Tiling
from baton_kernels.cuda.weight_tiles import WeightOperand, groups_of, in_code_order, load_weights, row_factors

SORTED = 2048
"""Pairs that a program of ``_sort`` goes through at a time."""
TILES_OF_A_GROUP = 8
"""Tiles of pairs that are multiplied by the same columns one after the other: the weights of these are in the
second-level cache meanwhile."""
SUMMED = 1024
"""Columns of a program of ``_sum``."""


@bound
@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["experts", "order", "starts"])
def _sort(
    experts: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    pairs: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    last = tl.num_programs(0)
    lanes = tl.arange(0, TILE)
    lesser = tl.zeros([TILE], tl.int32)
    for at in range(0, pairs, TILE):
        chosen = tl.load(experts + at + lanes, mask=at + lanes < pairs, other=last)
        lesser += (chosen < expert).to(tl.int32)
    place = tl.sum(lesser, 0)
    tl.store(starts + expert, place)
    for at in range(0, pairs, TILE):
        chosen = tl.load(experts + at + lanes, mask=at + lanes < pairs, other=last)
        own = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, at + lanes, mask=own > 0)
        place += tl.sum(own, 0)
    if expert == last - 1:
        tl.store(starts + last, place)


@triton.jit
def _tile(
    starts: tl.tensor,
    experts: tl.tensor,
    tiles: tl.tensor,
    COLUMN_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The expert of this program, the first of its sorted pairs, the end of the expert's, and the tile of
    columns. The first is not before the end where the program has nothing to do."""
    program = tl.program_id(0)
    group = program // (GROUPED * COLUMN_TILES)
    within = program % (GROUPED * COLUMN_TILES)
    size = tl.minimum(tiles - group * GROUPED, GROUPED)
    tile = group * GROUPED + within % size
    expert = last_at_most(starts, experts, tile, ROWS)
    start = tl.load(starts + expert)
    first = start + (tile - start // ROWS - expert) * ROWS
    return expert, first, tl.load(starts + expert + 1), within // size


@bound
@triton.jit(
    do_not_specialize=["tiles", "experts"], do_not_specialize_on_alignment=["weights", "order", "starts"]
)
def _gate_up(
    x: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    experts: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
) -> None:
    expert, first, stop, column_tile = _tile(
        starts, experts, tiles, (INNER + COLUMNS - 1) // COLUMNS, ROWS, GROUPED
    )
    if first >= stop:
        return
    rows = first + tl.arange(0, ROWS)
    own = rows < stop
    # What lies beyond the end is computed over the first row, and not stored.
    pair = tl.load(order + tl.where(own, rows, first))
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < INNER
    depth = tl.arange(0, DEPTH)
    taken = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + depth[None, :]
    of_expert = tl.where(real, columns, 0).to(tl.int64)
    weight_rows = expert.to(tl.int64) * expert_stride + of_expert * row_stride
    up_rows = weight_rows + INNER * row_stride.to(tl.int64)
    of_expert += expert.to(tl.int64) * (2 * INNER)
    groups = groups_of(of_expert, HIDDEN, GROUP)
    up_groups = groups + groups_of(INNER, HIDDEN, GROUP)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0:
            a = tl.load(taken)
        else:
            a = tl.load(taken, mask=(at + depth < HIDDEN)[None, :], other=0.0)
        b = load_weights(
            gate_up, scales, zeros, weight_rows, groups, at,
            HIDDEN, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
        )  # fmt: skip
        c = load_weights(
            gate_up, scales, zeros, up_rows, up_groups, at,
            HIDDEN, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
        )  # fmt: skip
        gate = tl.dot(a, tl.trans(b.to(a.dtype)), gate, input_precision=PRECISION)
        up = tl.dot(a, tl.trans(c.to(a.dtype)), up, input_precision=PRECISION)
        taken += DEPTH
    gate *= row_factors(scales, factors, of_expert, GROUP, FORMAT, SCALE, HAS_FACTORS)[None, :]
    of_expert += INNER
    up *= row_factors(scales, factors, of_expert, GROUP, FORMAT, SCALE, HAS_FACTORS)[None, :]
    if WEIGHS_INPUT:
        weight = tl.load(weights + pair)[:, None]
        gate *= weight
        up *= weight
    if HAS_BIAS:
        gate += tl.load(bias + of_expert - INNER).to(tl.float32)[None, :]
        up += tl.load(bias + of_expert).to(tl.float32)[None, :]
    result = gated(gate, up, limit, ACTIVATION)
    target = out + rows.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=own[:, None] & real[None, :])


@bound
@triton.jit(
    do_not_specialize=["tiles", "experts"], do_not_specialize_on_alignment=["weights", "order", "starts"]
)
def _down(
    inner: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    experts: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
) -> None:
    expert, first, stop, column_tile = _tile(
        starts, experts, tiles, (HIDDEN + COLUMNS - 1) // COLUMNS, ROWS, GROUPED
    )
    if first >= stop:
        return
    rows = first + tl.arange(0, ROWS)
    own = rows < stop
    rows = tl.where(own, rows, first)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < HIDDEN
    depth = tl.arange(0, DEPTH)
    taken = inner + rows.to(tl.int64)[:, None] * INNER + depth[None, :]
    of_expert = tl.where(real, columns, 0).to(tl.int64)
    weight_rows = expert.to(tl.int64) * expert_stride + of_expert * row_stride
    of_expert += expert.to(tl.int64) * HIDDEN
    groups = groups_of(of_expert, INNER, GROUP)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0:
            a = tl.load(taken)
        else:
            a = tl.load(taken, mask=(at + depth < INNER)[None, :], other=0.0)
        b = load_weights(
            down, scales, zeros, weight_rows, groups, at,
            INNER, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
        )  # fmt: skip
        acc = tl.dot(a, tl.trans(b.to(a.dtype)), acc, input_precision=PRECISION)
        taken += DEPTH
    acc *= row_factors(scales, factors, of_expert, GROUP, FORMAT, SCALE, HAS_FACTORS)[None, :]
    pair = tl.load(order + rows)
    if HAS_BIAS:
        acc += tl.load(bias + of_expert).to(tl.float32)[None, :]
    if not WEIGHS_INPUT:
        acc *= tl.load(weights + pair)[:, None]
    target = out + pair.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=own[:, None] & real[None, :])


@bound
@triton.jit
def _sum(
    results: tl.tensor, out: tl.tensor, hidden: tl.tensor, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < hidden
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(TOP_K):
        row = results + (token * TOP_K + place) * hidden
        total += tl.load(row + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + columns, total.to(out.dtype.element_ty), mask=real)


def sorted_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """experts [T, k] int32 below ``count`` -> the pairs t * k + place by expert, and by pair where these are
    equal, [T * k] int32, and where each expert's begin, [count + 1] int32."""
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    _sort[(count,)](experts, order, starts, pairs, TILE=SORTED, num_warps=8, enable_fp_fusion=True)
    return order, starts


def multiply_many(step: ExpertStep) -> Tensor:
    """The results of a step of any number of pairs: [T, hidden]."""
    order, starts = sorted_by_expert(step.experts, step.shape.experts)
    inner = _first_products(step, order, starts)
    return _sums(_second_products(step, inner, order, starts), step)


def _first_products(step: ExpertStep, order: Tensor, starts: Tensor) -> Tensor:
    """What goes into the second product of each of the sorted pairs, [T * k, inner]."""
    tensors, shape, weight = step.tensors, step.shape, step.gate_up
    tiling = shape.gate_up(shape.rows(step.pairs))
    tiles = step.pairs // tiling.rows + shape.experts
    out = torch.empty((step.pairs, shape.inner), dtype=step.x.dtype, device=step.x.device)
    _gate_up[(tiles * triton.cdiv(shape.inner, tiling.tile),)](
        step.x,
        *weight.tensors,
        weight.tensors[0] if tensors.gate_up_bias is None else tensors.gate_up_bias,
        step.weights,
        order,
        starts,
        out,
        tiles,
        shape.experts,
        step.x_stride,
        *weight.strides,
        tensors.activation.number,
        TOP_K=step.experts.shape[1],
        ACTIVATION=tensors.activation.kind,
        HAS_BIAS=tensors.gate_up_bias is not None,
        **_how(step, weight, tiling),
    )
    return out


def _second_products(step: ExpertStep, inner: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """The result of each pair at its own place, [T * k, hidden]."""
    tensors, shape, weight = step.tensors, step.shape, step.down
    tiling = shape.down(shape.rows(step.pairs))
    tiles = step.pairs // tiling.rows + shape.experts
    out = torch.empty((step.pairs, shape.hidden), dtype=step.x.dtype, device=step.x.device)
    _down[(tiles * triton.cdiv(shape.hidden, tiling.tile),)](
        in_code_order(inner, tensors.down),
        *weight.tensors,
        weight.tensors[0] if tensors.down_bias is None else tensors.down_bias,
        step.weights,
        order,
        starts,
        out,
        tiles,
        shape.experts,
        *weight.strides,
        HAS_BIAS=tensors.down_bias is not None,
        **_how(step, weight, tiling),
    )
    return out


def _how(step: ExpertStep, weight: WeightOperand, tiling: Tiling) -> dict[str, object]:
    """The constants of both products."""
    return {
        "HIDDEN": step.shape.hidden,
        "INNER": step.shape.inner,
        "WEIGHS_INPUT": step.weighs_input,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.tile,
        "DEPTH": weight.depth(step.shape.depth),
        "GROUPED": TILES_OF_A_GROUP,
        "PRECISION": "ieee" if step.shape.exact else "tf32",
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        "enable_fp_fusion": True,
        **weight.constants,
    }


def _sums(results: Tensor, step: ExpertStep) -> Tensor:
    """results [T * k, hidden] -> the sums of each token's, [T, hidden]."""
    tokens, top_k = step.experts.shape
    hidden = step.shape.hidden
    out = torch.empty((tokens, hidden), dtype=results.dtype, device=results.device)
    grid = (tokens, triton.cdiv(hidden, SUMMED))
    _sum[grid](results, out, hidden, TOP_K=top_k, COLUMNS=SUMMED, num_warps=4, enable_fp_fusion=True)
    return out
