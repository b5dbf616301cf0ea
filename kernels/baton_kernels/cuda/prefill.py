"""Attention of prompt chunks of any lengths behind cached prefixes of any lengths.

A program takes a run of queries of one chunk, with all query heads that share a KV head: a tile of
(query, head) rows. Keys that all of its rows see are gone through without a mask, only the tiles at the edge
of the window and on the diagonal with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.shapes import Shape, base_two
from baton_kernels.cuda.tiles import accumulate, last_at_most, load_tile
from baton_kernels.paged import Chunk


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Where the C chunks of one step lie; the same for all layers and windows."""

    chunks: Tensor
    """[4, C + 1] int32: queries before each chunk, its first row in the step, its context, where its table
    begins. The last column has only the number of all queries."""
    tables: Tensor
    """[blocks of all chunks] int64."""
    queries: int
    longest: int
    """Queries of the longest chunk."""

    @classmethod
    def build(cls, chunks: Sequence[Chunk], device: torch.device) -> PrefillPlan:
        columns = []
        queries = blocks = 0
        for chunk in chunks:
            columns.append((queries, chunk.start, chunk.context, blocks))
            queries += chunk.length
            blocks += chunk.table.numel()
        columns.append((queries, 0, 0, 0))
        described = torch.tensor(columns, dtype=torch.int32).T.contiguous()
        tables = torch.cat([chunk.table for chunk in chunks])
        return cls(described.to(device), tables, queries, max(chunk.length for chunk in chunks))


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
            seen = seen & (token > position[:, None] - window)
        acc, peak, total = accumulate(
            acc, peak, total, query, k, v, seen, scale, softcap, HAS_SOFTCAP, MASKED, PRECISION
        )
    return acc, peak, total


@triton.jit(do_not_specialize=["layer", "chunk_count", "window"])
def _prefill(
    q: tl.tensor,
    pool: tl.tensor,
    chunks: tl.tensor,
    tables: tl.tensor,
    out: tl.tensor,
    layer: tl.tensor,
    chunk_count: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last queries of a chunk see most, so they begin first.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    # The programs of chunk i begin at (queries before it) // QUERIES + i, which leaves enough for all before
    # it, so that the plan depends on no tile size. What is too much ends here.
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
    real = ((members < QUERIES * GROUP) & (number < length))[:, None] & (dims < HEAD_DIM)[None, :]
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
        low = tl.maximum(first - window + 1, 0)
        inner_begin = tl.cdiv(tl.maximum(last - window + 1, 0), TILE)
    begin = low // TILE
    end = tl.cdiv(last + 1, TILE)
    inner_begin = tl.minimum(inner_begin, end)
    inner_end = tl.maximum((first + 1) // TILE, inner_begin)

    pool_head = pool + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * layer_stride
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_WINDOW:
        acc, peak, total = _pass(
            acc, peak, total, query, position, pool_head, table, begin, inner_begin, low, last + 1, window,
            scale, softcap, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, HAS_WINDOW, HAS_SOFTCAP, True,
            PRECISION,
        )  # fmt: skip
    acc, peak, total = _pass(
        acc, peak, total, query, position, pool_head, table, inner_begin, inner_end, low, last + 1, window,
        scale, softcap, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, HAS_WINDOW, HAS_SOFTCAP, False,
        PRECISION,
    )  # fmt: skip
    acc, peak, total = _pass(
        acc, peak, total, query, position, pool_head, table, inner_end, end, low, last + 1, window,
        scale, softcap, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, HAS_WINDOW, HAS_SOFTCAP, True,
        PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + ((row * heads + head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real)


def prefill_attention(
    pool: Tensor,
    layer: int,
    q: Tensor,
    out: Tensor,
    plan: PrefillPlan,
    shape: Shape,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """q [T, heads, head_dim] -> the chunks' rows of ``out``, contiguous, of the same shape."""
    _, heads, head_dim = q.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    tiling = shape.prefill(group, plan.longest)
    chunk_count = plan.chunks.shape[1] - 1
    _prefill[(plan.queries // (tiling.rows // group) + chunk_count, kv_heads)](
        q,
        pool,
        plan.chunks,
        plan.tables,
        out,
        layer,
        chunk_count,
        window or 0,
        *base_two(scale, softcap),
        q.stride(0),
        q.stride(1),
        *pool.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        DIMS=shape.dims,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=shape.precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )
