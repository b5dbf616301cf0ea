"""Attention of absorbed queries over the latents of the pool.

All query heads read the same latents, so the rows of a tile are queries with all heads, and a tile of latents
is read once for all of them, as keys and as values. More rows than a tile has make several tiles, whose
programs find the latents in the device's cache.

As in ``baton_kernels.cuda.decode``, all tiles of latents of a step, sequence behind sequence, are shared out
evenly to a fixed number of programs; only the device reads lengths, and the grid depends on none. Parts of
sequences are joined by a second kernel, over all of the device: a part of 64 rows is 128 KiB, which are too
many for the last program to arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.latent_shapes import LatentShape
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import base_two
from baton_kernels.cuda.tiles import add_tile, join, last_at_most
from baton_kernels.paged import Chunk

MIN_SHARE = 4
"""Fewest tiles of a program, as in decode."""
JOINED_ROWS = 4
"""Rows of a program that joins parts."""


@dataclass(frozen=True, slots=True)
class AbsorbedRows:
    """The distribution of S sequences of absorbed queries over programs; the same for all layers."""

    tables: Tensor
    """[S, blocks] int64; [blocks of all chunks] where ``places`` says where each table begins."""
    contexts: Tensor
    """[S * queries] integers: tokens that each query sees; 0: the row is padding. With ``places``, [S]: those
    that each sequence's last query sees."""
    places: Tensor | None
    """[3 * S] int32: each sequence's first row, then where each table begins, then each one's queries, of
    which one sees a token more than the one before. None: the sequences' rows follow each other, ``queries``
    each."""
    starts: Tensor
    """[S + 1] int32: the index of each sequence's first tile among the tiles of all. Every sequence has at
    least one: one without context gets zeros for its output."""
    queries: int
    """Most queries of a sequence."""
    programs: int
    """The number of programs for each tile of rows."""

    @classmethod
    def of_sequences(cls, tables: Tensor, contexts: Tensor, tile: int, programs: int) -> AbsorbedRows:
        """Plans sequences whose rows follow each other, by operations of the device alone: a graph can hold
        it. ``tile``: latents of a tile."""
        sequences = tables.shape[0]
        queries = contexts.numel() // sequences
        most = contexts if queries == 1 else contexts.view(sequences, queries).amax(1)
        starts = torch.zeros(sequences + 1, dtype=torch.int32, device=contexts.device)
        tiles = ((most + (tile - 1)) // tile).clamp(min=1)
        torch.cumsum(tiles, 0, dtype=torch.int32, out=starts[1:])
        return cls(tables, contexts, None, starts, queries, programs)

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], queries: int, tile: int, programs: int) -> AbsorbedRows:
        """Plans chunks in pieces of ``queries`` rows, described by the host in one copy."""
        pieces = list[tuple[int, int, int, int]]()
        begin = 0
        for chunk in chunks:
            for first in range(0, chunk.length, queries):
                length = min(queries, chunk.length - first)
                context = chunk.context - chunk.length + first + length
                pieces.append((context, chunk.start + first, begin, length))
            begin += chunk.table.numel()
        tiles = itertools.accumulate((-(-context // tile) for context, *_ in pieces), initial=0)
        numbers = [number for line in zip(*pieces, strict=True) for number in line] + [*tiles]
        tables = chunks[0].table if len(chunks) == 1 else torch.cat([chunk.table for chunk in chunks])
        on_cuda = tables.device.type == "cuda"
        described = torch.tensor(numbers, dtype=torch.int32, pin_memory=on_cuda)
        sizes = (len(pieces), 3 * len(pieces), len(pieces) + 1)
        parts = described.to(tables.device, non_blocking=on_cuda).split_with_sizes(sizes)
        contexts, places, starts = parts
        return cls(tables, contexts, places, starts, queries, programs)


@triton.jit
def _scores(
    q: tl.tensor,
    q_rest: tl.tensor,
    k: tl.tensor,
    k_rest: tl.tensor,
    REST: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if REST > 0:
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _members(start: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """The rows of this program's tile. ``start``, that of a sequence, is not below 0, which the compiler
    cannot know: it works out the addresses of rows where they are needed, and keeps none in registers that
    the sums need."""
    return tl.program_id(1) * ROWS + tl.arange(0, ROWS) + tl.minimum(start, 0)


@bound
@triton.jit(
    do_not_specialize=["layer", "sequences", "queries", "table_stride"],
    do_not_specialize_on_alignment=["tables", "contexts", "places", "starts"],
)
def _absorbed(
    q: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    places: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_totals: tl.tensor,
    layer: tl.tensor,
    sequences: tl.tensor,
    queries: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    SHARE: tl.constexpr,
    SINGLE: tl.constexpr,
    PLACED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    all_tiles = tl.load(starts + sequences)
    share = tl.maximum(tl.cdiv(all_tiles, tl.num_programs(0)), SHARE)
    at = program * share
    stop = tl.minimum(at + share, all_tiles)
    if at >= stop:
        return
    dims = tl.arange(0, DIMS)
    rest = VALUE + tl.arange(0, max(16, REST))
    rows = queries * HEADS
    pool += layer.to(tl.int64) * layer_stride
    sequence = last_at_most(starts, sequences, at, 0)
    while tl.condition(at < stop, disable_licm=True):
        first = tl.load(starts + sequence)
        last = tl.load(starts + sequence + 1)
        until = tl.minimum(last, stop)
        members = _members(first, ROWS)
        number = members // HEADS
        if SINGLE or PLACED:
            context = tl.load(contexts + sequence).to(tl.int32)
        if PLACED:
            row = tl.load(places + sequence)
            table = tables + tl.load(places + sequences + sequence)
            length = tl.load(places + 2 * sequences + sequence)
            seeing = context - length + 1 + number
        else:
            row = sequence * queries
            table = tables + sequence.to(tl.int64) * table_stride
            length = queries
            if SINGLE:
                seeing = tl.full([ROWS], 0, tl.int32) + context
            else:
                seen = contexts + sequence * queries + number
                seeing = tl.load(seen, mask=number < queries, other=0).to(tl.int32)
                context = tl.max(seeing, 0)
        own = number < length
        wide = q + ((row.to(tl.int64) * HEADS + members) * WIDTH)[:, None]
        query = tl.load(wide + dims[None, :], mask=own[:, None] & (dims < VALUE)[None, :], other=0.0)
        query_rest = tl.load(wide + rest[None, :], mask=own[:, None] & (rest < WIDTH)[None, :], other=0.0)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for tile in tl.range(at - first, until - first, disable_licm=True):
            tokens = tile * TILE + tl.arange(0, TILE)
            if BLOCK_SIZE % TILE == 0:  # one block holds the whole tile: its slots are constants apart
                block = pool + tl.load(table + tile * TILE // BLOCK_SIZE) * block_stride
                slots = block + tile * TILE % BLOCK_SIZE * WIDTH + tl.arange(0, TILE) * WIDTH
            else:
                blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < context, other=0)
                slots = pool + blocks * block_stride + tokens % BLOCK_SIZE * WIDTH
            there = (tokens < context)[:, None]  # other slots may hold NaN
            k = tl.load(slots[:, None] + dims[None, :], mask=there & (dims < VALUE)[None, :], other=0.0)
            k_rest = k
            if REST > 0:
                behind = (rest < WIDTH)[None, :]
                k_rest = tl.load(slots[:, None] + rest[None, :], mask=there & behind, other=0.0)
            scores = _scores(query, query_rest, k, k_rest, REST, PRECISION) * scale
            scores = tl.where(tokens[None, :] < seeing[:, None], scores, float("-inf"))
            acc, peak, total = add_tile(acc, peak, total, scores, k, True, PRECISION)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        members = _members(last, ROWS)
        own = members < length * HEADS
        real = own[:, None] & (dims < VALUE)[None, :]
        if (at == first) & (until == last):
            target = out + ((row.to(tl.int64) * HEADS + members) * VALUE)[:, None] + dims[None, :]
            tl.store(target, acc.to(out.dtype.element_ty), mask=real)
        else:
            part = (2 * program + (at == first).to(tl.int32)) * rows + members
            tl.store(parts + part.to(tl.int64)[:, None] * VALUE + dims[None, :], acc, mask=real)
            tl.store(part_totals + part, peak + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=own)
        at = until
        sequence += 1


@bound
@triton.jit(
    do_not_specialize=["sequences", "queries", "programs"],
    do_not_specialize_on_alignment=["places", "starts"],
)
def _join_absorbed(
    places: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_totals: tl.tensor,
    sequences: tl.tensor,
    queries: tl.tensor,
    programs: tl.tensor,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    SHARE: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    share = tl.maximum(tl.cdiv(tl.load(starts + sequences), programs), SHARE)
    begun = tl.load(starts + sequence) // share
    ended = (tl.load(starts + sequence + 1) - 1) // share
    if begun == ended:  # its program has written the output
        return
    members = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    rows = queries * HEADS
    row = sequence * queries
    length = queries
    if PLACED:
        row = tl.load(places + sequence)
        length = tl.load(places + 2 * sequences + sequence)
    own = members < length * HEADS
    # The first part is the one that its program leaves unfinished (slot 2p + 1); all others are continued
    # (slot 2p).
    base = (2 * begun).to(tl.int64) * rows + tl.program_id(1) * ROWS
    acc = join(parts, part_totals, base + rows, base, 2 * rows, ended - begun + 1, own, VALUE, ROWS, DIMS, 2)
    target = out + ((row.to(tl.int64) * HEADS + members) * VALUE)[:, None] + dims[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=own[:, None] & (dims < VALUE)[None, :])


def attend_absorbed(
    view: Tensor, layer: int, q: Tensor, out: Tensor, plan: AbsorbedRows, shape: LatentShape, scale: float
) -> None:
    """q [R, heads, width] -> the plan's rows of ``out`` [R, heads, value_dim]; both contiguous."""
    heads, value_dim = out.shape[1:]
    split, tiling = shape.parts(value_dim), shape.absorbed(plan.queries)
    rows, sequences = plan.queries * heads, plan.starts.numel() - 1
    parts = torch.empty((2 * plan.programs, rows, value_dim), dtype=torch.float32, device=q.device)
    part_totals = torch.empty((2 * plan.programs, rows), dtype=torch.float32, device=q.device)
    placed = plan.places is not None
    places = plan.starts if plan.places is None else plan.places
    dims, rest = split.padded
    _absorbed[(plan.programs, shape.row_tiles(plan.queries))](
        q,
        view,
        plan.tables,
        plan.contexts,
        places,
        plan.starts,
        out,
        parts,
        part_totals,
        layer,
        sequences,
        plan.queries,
        base_two(scale, None)[0],
        0 if placed else plan.tables.stride(0),
        view.stride(0),
        view.stride(2),
        HEADS=heads,
        WIDTH=shape.width,
        VALUE=value_dim,
        BLOCK_SIZE=shape.block_size,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        DIMS=dims,
        REST=rest,
        SHARE=MIN_SHARE,
        SINGLE=plan.queries == 1 and not placed,
        PLACED=placed,
        PRECISION=shape.precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=255,  # as in decode
        enable_fp_fusion=True,
    )
    _join_absorbed[(sequences, triton.cdiv(rows, JOINED_ROWS))](
        places,
        plan.starts,
        out,
        parts,
        part_totals,
        sequences,
        plan.queries,
        plan.programs,
        HEADS=heads,
        VALUE=value_dim,
        ROWS=JOINED_ROWS,
        DIMS=dims,
        SHARE=MIN_SHARE,
        PLACED=placed,
        num_warps=4,
        enable_fp_fusion=True,
    )
