"""Attention of prompt chunks of any lengths behind cached prefixes of any lengths.

A program takes a run of queries of one chunk, with all query heads that share a KV head: a tile of (query,
head) rows. Keys that all of its rows see are processed without a mask, only the tiles at the edge of the
window and on the diagonal with one.

Where a step has fewer tiles of rows than the device has room for programs, as a short chunk behind a long
prefix has, the keys of each tile are split as well. The last of its programs to be ready joins their parts,
always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import Shape, base_two, window_size
from baton_kernels.cuda.tiles import LOG2_E, accumulate, join, last_at_most, load_tile, window_start
from baton_kernels.cuda.tuned import Tiling
from baton_kernels.kv_fp8 import FP8
from baton_kernels.paged import Chunk
from baton_kernels.window import ChunkedWindow, Window

MIN_SHARE = 8
"""Fewest tiles of keys of a program that shares a tile of rows: a shorter part costs more to join than it
saves."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The places of the C chunks of one step; the same for all layers and windows."""

    chunks: Tensor
    """[4, C + 1] int32: queries before each chunk, its first row in the step, its context, where its table
    begins. The last column has only the number of all queries."""
    tables: Tensor
    """[blocks of all chunks] int64."""
    arrivals: Tensor | None
    """[programs * kv_heads] int32, all 0 between launches: the parts of each tile of rows that are ready.
    None: no tile of rows is split."""
    programs: int
    """Tiles of rows, for each KV head."""
    splits: int
    """Most programs that share the keys of a tile of rows."""

    @staticmethod
    def numbers(chunks: Sequence[tuple[Chunk, int]]) -> list[int]:
        """The numbers of ``PrefillPlan.chunks``. Each chunk comes with the place where its table begins."""
        queries, columns = 0, []
        for chunk, table in chunks:
            columns.append((queries, chunk.start, chunk.context, table))
            queries += chunk.length
        columns.append((queries, 0, 0, 0))
        return [number for line in zip(*columns, strict=True) for number in line]

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        described: Tensor,
        tables: Tensor,
        tiling: Tiling,
        group: int,
        kv_heads: int,
        programs: int,
        may_split: bool,
    ) -> PrefillPlan:
        """``described``: the numbers of :meth:`numbers`, on the device. ``programs``: those that the device
        has room for."""
        count = sum(chunk.length for chunk in chunks) // (tiling.rows // group) + len(chunks)
        keys = max(chunk.context for chunk in chunks)
        splits = (
            min(programs // (count * kv_heads), -(-keys // (tiling.tile * MIN_SHARE))) if may_split else 1
        )
        arrivals = None
        if splits > 1:
            arrivals = torch.zeros(count * kv_heads, dtype=torch.int32, device=described.device)
        return cls(described.view(4, len(chunks) + 1), tables, arrivals, count, max(1, splits))


@triton.jit
def _pass(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    position: tl.tensor,
    pool_head: tl.tensor,
    table: tl.tensor,
    tile_begin: tl.tensor,
    tile_end: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go through tiles tile_begin..tile_end-1, with a mask or without."""
    for tile in range(tile_begin, tile_end):
        k, v = load_tile(
            pool_head, table, tile, low, high, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, MASKED
        )
        token = (tile * TILE + tl.arange(0, TILE))[None, :]
        seen = token <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (token >= window_start(position + 1, window, CHUNKED)[:, None])
        acc, peak, total = accumulate(
            acc, peak, total, query, k, v, seen, scale, softcap, HAS_SOFTCAP, MASKED, PRECISION
        )
    return acc, peak, total


@bound
@triton.jit(
    do_not_specialize=["layer", "chunk_count", "window"],
    do_not_specialize_on_alignment=["chunks", "tables", "arrivals", "sinks"],
)
def _prefill(
    q: tl.tensor,
    pool: tl.tensor,
    chunks: tl.tensor,
    tables: tl.tensor,
    arrivals: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_totals: tl.tensor,
    layer: tl.tensor,
    chunk_count: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    value_scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    layer_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    SHARE: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last queries of a chunk see most keys, so they begin first.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    # The programs of chunk i begin at (queries before it) // QUERIES + i, which leaves enough for all chunks
    # before it, so that the plan depends on no tile size. Surplus programs end here.
    columns = chunk_count + 1
    chunk = last_at_most(chunks, chunk_count, index, QUERIES)
    before = tl.load(chunks + chunk)
    length = tl.load(chunks + chunk + 1) - before
    first_query = (index - (before // QUERIES + chunk)) * QUERIES
    if first_query >= length:
        return
    first_row = tl.load(chunks + columns + chunk)
    context = tl.load(chunks + 2 * columns + chunk)
    table = tables + tl.load(chunks + 3 * columns + chunk)

    members = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    number = first_query + members // GROUP
    head = kv_head * GROUP + members % GROUP
    own = (members < QUERIES * GROUP) & (number < length)
    real = own[:, None] & (dims < HEAD_DIM)[None, :]
    row = (first_row + number).to(tl.int64)
    query = tl.load(q + (row * q_token + head * q_head)[:, None] + dims[None, :], mask=real, other=0.0)
    # Positions in the sequence: of every row, of the first query and of the last.
    cached = context - length
    position = cached + number
    first = cached + first_query
    last = cached + tl.minimum(first_query + QUERIES, length) - 1

    low = 0
    inner_begin = 0
    if HAS_WINDOW:
        low = tl.maximum(window_start(first + 1, window, CHUNKED), 0)
        inner_begin = tl.cdiv(tl.maximum(window_start(last + 1, window, CHUNKED), 0), TILE)
    begin = low // TILE
    end = tl.cdiv(last + 1, TILE)
    shares = 1
    if MAY_SPLIT:
        # The share of this program in the tiles of keys.
        share = tl.maximum(tl.cdiv(end - begin, tl.num_programs(2)), SHARE)
        shares = tl.cdiv(end - begin, share)
        begin += tl.program_id(2) * share
        if begin >= end:
            return
        end = tl.minimum(begin + share, end)
        inner_begin = tl.maximum(inner_begin, begin)
    inner_begin = tl.minimum(inner_begin, end)
    inner_end = tl.minimum(tl.maximum((first + 1) // TILE, inner_begin), end)

    pool_head = pool + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * layer_stride
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # counted by the program of the first keys; for others, 1 over 2**-inf is nothing
        peak = tl.where(tl.program_id(2) == 0, tl.load(sinks + head) * LOG2_E, peak)
        total += 1.0
    if HAS_WINDOW:
        acc, peak, total = _pass(
            acc, peak, total, query, position, pool_head, table, begin, inner_begin, low, last + 1, window,
            scale, softcap, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, HAS_WINDOW, CHUNKED, HAS_SOFTCAP,
            True, PRECISION,
        )  # fmt: skip
    acc, peak, total = _pass(
        acc, peak, total, query, position, pool_head, table, inner_begin, inner_end, low, last + 1, window,
        scale, softcap, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, HAS_WINDOW, CHUNKED, HAS_SOFTCAP,
        False, PRECISION,
    )  # fmt: skip
    acc, peak, total = _pass(
        acc, peak, total, query, position, pool_head, table, inner_end, end, low, last + 1, window,
        scale, softcap, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, HAS_WINDOW, CHUNKED, HAS_SOFTCAP,
        True, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if pool.dtype.element_ty.primitive_bitwidth == 8:
        acc *= value_scale
    target = out + ((row * heads + head) * HEAD_DIM)[:, None] + dims[None, :]
    if (not MAY_SPLIT) or (shares == 1):
        tl.store(target, acc.to(out.dtype.element_ty), mask=real)
    else:
        place = index * tl.num_programs(1) + kv_head
        base = place * tl.num_programs(2) * ROWS
        part = base + tl.program_id(2) * ROWS + members
        tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
        weight = peak + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(part_totals + part, weight, mask=own)
        tl.debug_barrier()  # every thread's stores are before the arrival
        if tl.atomic_add(arrivals + place, 1, sem="acq_rel") == shares - 1:
            acc = join(parts, part_totals, base, base, ROWS, shares, own, HEAD_DIM, ROWS, DIMS, 1)
            tl.store(target, acc.to(out.dtype.element_ty), mask=real)
            tl.store(arrivals + place, 0)


def prefill_attention(
    pool: Tensor,
    layer: int,
    q: Tensor,
    out: Tensor,
    plan: PrefillPlan,
    shape: Shape,
    scale: float,
    window: Window | None,
    softcap: float | None,
    sinks: Tensor | None,
    value_scale: float = 1.0,
) -> None:
    """q [T, heads, head_dim] -> the chunks' rows of ``out``, contiguous, of the same shape. ``scale`` and
    ``value_scale``: of products with keys, and of values, as they are stored."""
    _, heads, head_dim = q.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    tiling = shape.prefill(group)
    chunk_count = plan.chunks.shape[1] - 1
    rows = plan.programs * kv_heads * plan.splits * tiling.rows if plan.arrivals is not None else 0
    parts = torch.empty((rows, head_dim), dtype=torch.float32, device=q.device)
    part_totals = torch.empty(rows, dtype=torch.float32, device=q.device)
    _prefill[(plan.programs, kv_heads, plan.splits)](
        q,
        pool,
        plan.chunks,
        plan.tables,
        plan.chunks if plan.arrivals is None else plan.arrivals,
        part_totals if sinks is None else sinks,
        out,
        parts,
        part_totals,
        layer,
        chunk_count,
        window_size(window),
        *base_two(scale, softcap),
        value_scale,
        q.stride(0),
        q.stride(1),
        *pool.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        DIMS=shape.dims,
        SHARE=MIN_SHARE,
        MAY_SPLIT=shape.splits_prefill,
        HAS_WINDOW=window is not None,
        CHUNKED=isinstance(window, ChunkedWindow),
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=shape.precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=255 if shape.exact or shape.dtype == FP8 else None,  # as in decode
        enable_fp_fusion=True,
    )
