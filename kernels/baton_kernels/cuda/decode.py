"""Attention of decoding rows: one query each, over contexts of any lengths, split evenly over the device.

Each context is cut into tiles of keys. All tiles of a step, sequence behind sequence, are shared out evenly
to a fixed number of programs, so that one long context among short ones keeps no program busy for longer than
the others. A program's share may begin or end within a sequence: such parts go to a workspace, and ``_merge``
joins them. A program has two of these at most, the part it goes on with and the part that it leaves.

Only the device reads lengths, and the grid depends on none of them: what is captured in a CUDA graph serves
every mix of lengths. All query heads that share a KV head stand in one tile, so each K and V is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.shapes import Shape, base_two
from baton_kernels.cuda.tiles import accumulate, last_at_most, load_tile

LEAST_SHARE = 4
"""Tiles that a program takes at least: a part that is shorter costs more to merge than it saves."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How the decoding rows of one step are shared out; the same for all layers of one window."""

    tables: Tensor
    """[S, blocks] int64."""
    contexts: Tensor
    """[S] int64."""
    starts: Tensor
    """[S + 1] int32: where each row's tiles begin among those of all rows. Every row has one at least: one
    with no context, as padding has it, gets zeros for its output."""
    window: int | None
    programs: int
    """For each KV head."""

    @classmethod
    def build(
        cls, tables: Tensor, contexts: Tensor, window: int | None, tile: int, programs: int
    ) -> DecodePlan:
        """``tile``: keys per tile (``Shape.decode_tile``)."""
        tiles = (contexts + (tile - 1)) // tile
        if window is not None:
            tiles = tiles - (contexts - window).clamp(min=0) // tile
        starts = torch.zeros(contexts.numel() + 1, dtype=torch.int32, device=contexts.device)
        torch.cumsum(tiles.clamp(min=1), 0, dtype=torch.int32, out=starts[1:])
        return cls(tables, contexts, starts, window, programs)


@triton.jit(do_not_specialize=["layer", "rows", "window", "table_stride"])
def _decode(
    q: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_totals: tl.tensor,
    layer: tl.tensor,
    rows: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    table_stride: tl.tensor,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    all_tiles = tl.load(starts + rows)
    share = tl.maximum(tl.cdiv(all_tiles, tl.num_programs(0)), SHARE)
    begin = program * share
    stop = tl.minimum(begin + share, all_tiles)
    if begin >= stop:
        return
    members = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    real = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pool_head = pool + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * layer_stride
    row = last_at_most(starts, rows, begin, 0)
    at = begin
    while at < stop:
        first = tl.load(starts + row)
        last = tl.load(starts + row + 1)
        until = tl.minimum(last, stop)
        context = tl.load(contexts + row).to(tl.int32)
        low = 0
        if HAS_WINDOW:
            low = tl.maximum(context - window, 0)
        shift = low // TILE - first
        head = kv_head * GROUP + members
        query = tl.load(
            q + row.to(tl.int64) * q_token + head[:, None] * q_head + dims[None, :], mask=real, other=0.0
        )
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        table = tables + row.to(tl.int64) * table_stride
        for tile in range(at + shift, until + shift):
            k, v = load_tile(
                pool_head, table, tile, low, context, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, True
            )
            token = tile * TILE + tl.arange(0, TILE)
            seen = ((token >= low) & (token < context))[None, :]
            acc, peak, total = accumulate(
                acc, peak, total, query, k, v, seen, scale, softcap, HAS_SOFTCAP, True, PRECISION
            )
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if (at == first) & (until == last):
            target = out + (row.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, acc.to(out.dtype.element_ty), mask=real)
        else:
            part = (2 * program + (at == first).to(tl.int32)) * heads + head
            tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
            tl.store(part_totals + part, peak + tl.log2(total), mask=members < GROUP)
        at = until
        row += 1


@triton.jit(do_not_specialize=["rows", "programs"])
def _merge(
    out: tl.tensor,
    parts: tl.tensor,
    part_totals: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    programs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SHARE: tl.constexpr,
) -> None:
    """The mean of a row's parts, weighted by their totals (logarithms to the base 2), for one query head."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    share = tl.maximum(tl.cdiv(tl.load(starts + rows), programs), SHARE)
    begin = tl.load(starts + row) // share
    end = (tl.load(starts + row + 1) - 1) // share
    if begin == end:
        return
    dims = tl.arange(0, DIMS)
    real = dims < HEAD_DIM
    # The first part is the one that its program leaves (slot 2p + 1); all others are gone on with (slot 2p).
    part = (2 * begin + 1) * heads + head
    acc = tl.load(parts + part * HEAD_DIM + dims, mask=real, other=0.0)
    peak = tl.load(part_totals + part)
    total = 1.0
    for program in range(begin + 1, end + 1):
        part = 2 * program * heads + head
        other = tl.load(part_totals + part)
        higher = tl.maximum(peak, other)
        kept = tl.exp2(peak - higher)
        added = tl.exp2(other - higher)
        acc = acc * kept + added * tl.load(parts + part * HEAD_DIM + dims, mask=real, other=0.0)
        total = total * kept + added
        peak = higher
    target = out + (row.to(tl.int64) * heads + head) * HEAD_DIM + dims
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=real)


def decode_attention(
    pool: Tensor,
    layer: int,
    q: Tensor,
    out: Tensor,
    plan: DecodePlan,
    shape: Shape,
    scale: float,
    softcap: float | None,
) -> None:
    """q [S, heads, head_dim] -> ``out``, contiguous, of the same shape."""
    rows, heads, head_dim = q.shape
    kv_heads = pool.shape[1]
    parts = torch.empty((2 * plan.programs, heads, head_dim), dtype=torch.float32, device=q.device)
    part_totals = torch.empty((2 * plan.programs, heads), dtype=torch.float32, device=q.device)
    tiling = shape.decode(heads // kv_heads)
    scores = base_two(scale, softcap)
    _decode[(plan.programs, kv_heads)](
        q,
        pool,
        plan.tables,
        plan.contexts,
        plan.starts,
        out,
        parts,
        part_totals,
        layer,
        rows,
        plan.window or 0,
        *scores,
        plan.tables.stride(0),
        q.stride(0),
        q.stride(1),
        *pool.stride()[:3],
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        DIMS=shape.dims,
        SHARE=LEAST_SHARE,
        HAS_WINDOW=plan.window is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=shape.precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )
    _merge[(rows, heads)](
        out,
        parts,
        part_totals,
        plan.starts,
        rows,
        plan.programs,
        HEAD_DIM=head_dim,
        DIMS=shape.dims,
        SHARE=LEAST_SHARE,
        num_warps=1 if shape.dims <= 64 else 2,
        enable_fp_fusion=True,
    )
