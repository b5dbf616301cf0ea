"""The MLPs of a mixture's experts, whatever experts were chosen: the host knows only how many pairs of a token
and an expert there are, reads nothing back, and launches the same grids for the same number of tokens.

Few pairs are multiplied one by one: a program takes some outputs of one pair, or of all experts of one token,
and reads the rows of weights that they need. Programs of pairs that share an expert run at the same time, and
all but one find its weights in the second-level cache.

Many pairs are sorted by expert, and multiplied in tiles of pairs of one expert. Where an expert's tiles begin
follows from where its pairs do (``tiles.last_at_most``), which leaves up to one tile an expert without pairs:
programs of those end at once. Each pair's result goes to its own place, and a token's are added in the order
of its experts. Nothing depends on who arrived when.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.expert_shapes import ExpertShape, device_of, token_counts
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import Device
from baton_kernels.cuda.tiles import last_at_most
from baton_kernels.experts import ExpertTensors

SORTED = 2048
"""Pairs that a program of ``_sort`` goes through at a time."""
TILES_OF_A_GROUP = 8
"""Tiles of pairs that are multiplied by the same columns one after the other: the weights of these are in the
second-level cache meanwhile."""
FEW_COLUMNS = 4
"""Outputs of a program where there are few pairs."""
SUMMED = 1024
"""Columns of a program of ``_sum``."""


@triton.jit
def _gated(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """See ``baton_kernels.activation.gated``. float32. NaN stays NaN."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        slope = 1.702
    elif ACTIVATION == "gelu_tanh":
        # x (1 + tanh(u)) / 2 = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
    else:
        tl.static_assert(ACTIVATION == "silu")
        slope = 1.0
    return gate / (1.0 + tl.exp(-slope * gate)) * up


@bound
@triton.jit(do_not_specialize_on_alignment=["experts", "weights"])
def _gate_up_of_few(
    x: tl.tensor,
    gate_up: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
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
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < INNER
    expert = tl.load(experts + pair).to(tl.int64)
    token = x + pair // TOP_K * x_stride
    rows = gate_up + expert * expert_stride + columns[:, None].to(tl.int64) * row_stride
    of_gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    of_up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for at in range(0, HIDDEN, DEPTH):
        depth = at + tl.arange(0, DEPTH)
        own = real[:, None] & (depth < HIDDEN)[None, :]
        taken = tl.load(token + depth, mask=depth < HIDDEN, other=0.0).to(tl.float32)[None, :]
        places = rows + depth[None, :]
        of_gate += tl.load(places, mask=own, other=0.0).to(tl.float32) * taken
        places += INNER * row_stride.to(tl.int64)
        of_up += tl.load(places, mask=own, other=0.0).to(tl.float32) * taken
    gate = tl.sum(of_gate, 1)
    up = tl.sum(of_up, 1)
    if WEIGHS_INPUT:
        weight = tl.load(weights + pair)
        gate *= weight
        up *= weight
    if HAS_BIAS:
        of_expert = bias + expert * (2 * INNER) + columns
        gate += tl.load(of_expert, mask=real, other=0.0).to(tl.float32)
        up += tl.load(of_expert + INNER, mask=real, other=0.0).to(tl.float32)
    result = _gated(gate, up, limit, ACTIVATION)
    tl.store(out + pair * INNER + columns, result.to(out.dtype.element_ty), mask=real)


@bound
@triton.jit(do_not_specialize_on_alignment=["experts", "weights"])
def _down_of_few(
    inner: tl.tensor,
    down: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < HIDDEN
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts + pair).to(tl.int64)
        weight = 1.0
        if not WEIGHS_INPUT:
            weight = tl.load(weights + pair)
        rows = down + expert * expert_stride + columns[:, None].to(tl.int64) * row_stride
        for at in range(0, INNER, DEPTH):
            depth = at + tl.arange(0, DEPTH)
            own = real[:, None] & (depth < INNER)[None, :]
            taken = tl.load(inner + pair * INNER + depth, mask=depth < INNER, other=0.0).to(tl.float32)
            taken *= weight
            sums += tl.load(rows + depth[None, :], mask=own, other=0.0).to(tl.float32) * taken[None, :]
        if HAS_BIAS:
            of_expert = tl.load(bias + expert * HIDDEN + columns, mask=real, other=0.0).to(tl.float32)
            biases += of_expert * weight
    result = tl.sum(sums, 1) + biases
    tl.store(out + token * HIDDEN + columns, result.to(out.dtype.element_ty), mask=real)


@bound
@triton.jit(
    do_not_specialize=["pairs"], do_not_specialize_on_alignment=["experts", "order", "starts"]
)
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
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The expert of this program, the first of its sorted pairs, the end of the expert's, and the tile of
    columns. The first is not before the end where the program has nothing to do."""
    program = tl.program_id(0)
    group = program // (GROUP * COLUMN_TILES)
    within = program % (GROUP * COLUMN_TILES)
    size = tl.minimum(tiles - group * GROUP, GROUP)
    tile = group * GROUP + within % size
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
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    expert, first, stop, column_tile = _tile(
        starts, experts, tiles, (INNER + COLUMNS - 1) // COLUMNS, ROWS, GROUP
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
    weight_rows = tl.where(real, columns, 0).to(tl.int64)[:, None] * row_stride
    of_gate = gate_up + expert.to(tl.int64) * expert_stride + weight_rows + depth[None, :]
    of_up = of_gate + INNER * row_stride.to(tl.int64)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0:
            a = tl.load(taken)
            b = tl.load(of_gate)
            c = tl.load(of_up)
        else:
            within = (at + depth < HIDDEN)[None, :]
            a = tl.load(taken, mask=within, other=0.0)
            b = tl.load(of_gate, mask=within, other=0.0)
            c = tl.load(of_up, mask=within, other=0.0)
        gate = tl.dot(a, tl.trans(b), gate, input_precision=PRECISION)
        up = tl.dot(a, tl.trans(c), up, input_precision=PRECISION)
        taken += DEPTH
        of_gate += DEPTH
        of_up += DEPTH
    if WEIGHS_INPUT:
        weight = tl.load(weights + pair)[:, None]
        gate *= weight
        up *= weight
    if HAS_BIAS:
        of_expert = bias + expert.to(tl.int64) * (2 * INNER) + columns
        gate += tl.load(of_expert, mask=real, other=0.0).to(tl.float32)[None, :]
        up += tl.load(of_expert + INNER, mask=real, other=0.0).to(tl.float32)[None, :]
    result = _gated(gate, up, limit, ACTIVATION)
    target = out + rows.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=own[:, None] & real[None, :])


@bound
@triton.jit(
    do_not_specialize=["tiles", "experts"], do_not_specialize_on_alignment=["weights", "order", "starts"]
)
def _down(
    inner: tl.tensor,
    down: tl.tensor,
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
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    expert, first, stop, column_tile = _tile(
        starts, experts, tiles, (HIDDEN + COLUMNS - 1) // COLUMNS, ROWS, GROUP
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
    weight_rows = tl.where(real, columns, 0).to(tl.int64)[:, None] * row_stride
    of_down = down + expert.to(tl.int64) * expert_stride + weight_rows + depth[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0:
            a = tl.load(taken)
            b = tl.load(of_down)
        else:
            within = (at + depth < INNER)[None, :]
            a = tl.load(taken, mask=within, other=0.0)
            b = tl.load(of_down, mask=within, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
        taken += DEPTH
        of_down += DEPTH
    pair = tl.load(order + rows)
    if HAS_BIAS:
        of_expert = bias + expert.to(tl.int64) * HIDDEN + columns
        acc += tl.load(of_expert, mask=real, other=0.0).to(tl.float32)[None, :]
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


def multiply(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    tensors: ExpertTensors,
    weighs_input: bool,
    shape: ExpertShape | None = None,
) -> Tensor:
    """Does what ``baton_kernels.experts.loop_over_experts`` does. ``shape``: the tile sizes; None: those of
    x's device. Each expert must be one of the tensors'."""
    shape = shape or ExpertShape.of(tensors, device_of(x.device))
    _check(x, experts, weights, tensors, shape)
    if not len(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if experts.numel() <= shape.most_few:
        return _multiply_few(x, experts, weights, tensors, weighs_input, shape)
    return _multiply_many(x, experts, weights, tensors, weighs_input, shape)


def _multiply_few(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    tensors: ExpertTensors,
    weighs_input: bool,
    shape: ExpertShape,
) -> Tensor:
    tokens, top_k = experts.shape
    inner = torch.empty((tokens * top_k, shape.inner), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, shape.hidden), dtype=x.dtype, device=x.device)
    how = {
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "TOP_K": top_k,
        "WEIGHS_INPUT": weighs_input,
        "COLUMNS": FEW_COLUMNS,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    _gate_up_of_few[(tokens * top_k, triton.cdiv(shape.inner, FEW_COLUMNS))](
        x,
        tensors.gate_up,
        tensors.gate_up if tensors.gate_up_bias is None else tensors.gate_up_bias,
        experts,
        weights,
        inner,
        _row_stride(x),
        *tensors.gate_up.stride()[:2],
        tensors.activation.limit,
        ACTIVATION=tensors.activation.kind,
        HAS_BIAS=tensors.gate_up_bias is not None,
        DEPTH=shape.few_depth(shape.hidden),
        **how,
    )
    _down_of_few[(tokens, triton.cdiv(shape.hidden, FEW_COLUMNS))](
        inner,
        tensors.down,
        tensors.down if tensors.down_bias is None else tensors.down_bias,
        experts,
        weights,
        out,
        *tensors.down.stride()[:2],
        HAS_BIAS=tensors.down_bias is not None,
        DEPTH=shape.few_depth(shape.inner),
        **how,
    )
    return out


def sorted_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """experts [T, k] int32 below ``count`` -> the pairs t * k + place by expert, and by pair where these are
    equal, [T * k] int32, and where each expert's begin, [count + 1] int32."""
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    _sort[(count,)](experts, order, starts, pairs, TILE=SORTED, num_warps=8, enable_fp_fusion=True)
    return order, starts


def _multiply_many(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    tensors: ExpertTensors,
    weighs_input: bool,
    shape: ExpertShape,
) -> Tensor:
    pairs, top_k = experts.numel(), experts.shape[1]
    order, starts = sorted_by_expert(experts, shape.experts)
    rows = shape.rows(pairs)
    tiles = pairs // rows + shape.experts
    inner = torch.empty((pairs, shape.inner), dtype=x.dtype, device=x.device)
    results = torch.empty((pairs, shape.hidden), dtype=x.dtype, device=x.device)
    how = {
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "WEIGHS_INPUT": weighs_input,
        "ROWS": rows,
        "DEPTH": shape.depth,
        "GROUP": TILES_OF_A_GROUP,
        "PRECISION": "ieee" if shape.exact else "tf32",
        "enable_fp_fusion": True,
    }
    tiling = shape.gate_up(rows)
    _gate_up[(tiles * triton.cdiv(shape.inner, tiling.tile),)](
        x,
        tensors.gate_up,
        tensors.gate_up if tensors.gate_up_bias is None else tensors.gate_up_bias,
        weights,
        order,
        starts,
        inner,
        tiles,
        shape.experts,
        _row_stride(x),
        *tensors.gate_up.stride()[:2],
        tensors.activation.limit,
        TOP_K=top_k,
        ACTIVATION=tensors.activation.kind,
        HAS_BIAS=tensors.gate_up_bias is not None,
        COLUMNS=tiling.tile,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **how,
    )
    tiling = shape.down(rows)
    _down[(tiles * triton.cdiv(shape.hidden, tiling.tile),)](
        inner,
        tensors.down,
        tensors.down if tensors.down_bias is None else tensors.down_bias,
        weights,
        order,
        starts,
        results,
        tiles,
        shape.experts,
        *tensors.down.stride()[:2],
        HAS_BIAS=tensors.down_bias is not None,
        COLUMNS=tiling.tile,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **how,
    )
    return _summed(results, x, top_k)


def _summed(results: Tensor, x: Tensor, top_k: int) -> Tensor:
    """results [T * k, hidden] -> the sums of each token's, [T, hidden]."""
    tokens, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    grid = (tokens, triton.cdiv(hidden, SUMMED))
    _sum[grid](results, out, hidden, TOP_K=top_k, COLUMNS=SUMMED, num_warps=4, enable_fp_fusion=True)
    return out


def _row_stride(x: Tensor) -> int:
    """The numbers from row to row: of one row torch may say anything."""
    return x.stride(0) if len(x) > 1 else x.shape[1]


def _check(x: Tensor, experts: Tensor, weights: Tensor, tensors: ExpertTensors, shape: ExpertShape) -> None:
    for name, tensor in (("x", x), ("gate_up", tensors.gate_up), ("down", tensors.down)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"rows of {name} must be contiguous, not strided by {tensor.stride(-1)}")
        if tensor.dtype != shape.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: {shape.dtype}, as down is")
    if experts.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"experts {experts.dtype}, weights {weights.dtype}; allowed: int32, float32")
    for tensor in (experts, weights, tensors.gate_up_bias, tensors.down_bias):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"experts, weights and biases must be contiguous, not {tensor.stride()} apart")


def warm_up(
    tensors: ExpertTensors, top_k: int, weighs_input: bool, shape: ExpertShape | None = None
) -> None:
    """Launches every kernel that :meth:`multiply` launches for these tensors, or for others of their sizes,
    whatever the number of tokens."""
    device = tensors.down.device
    shape = shape or ExpertShape.of(tensors, device_of(device))
    for tokens in token_counts(shape, top_k):
        x = torch.zeros((tokens, shape.hidden), dtype=shape.dtype, device=device)
        experts = torch.zeros((tokens, top_k), dtype=torch.int32, device=device)
        weights = torch.zeros((tokens, top_k), dtype=torch.float32, device=device)
        multiply(x, experts, weights, tensors, weighs_input, shape)
