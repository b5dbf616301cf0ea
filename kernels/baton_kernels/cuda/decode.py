"""Attention of a few queries of each sequence, over contexts of any lengths, split evenly over the device.

A sequence has one query when it decodes, and one more for each draft when drafts are verified. Each context
is divided into tiles of keys. All tiles of a step, sequence behind sequence, are shared out evenly to a fixed
number of programs, so that one long context among short ones keeps no program busy for longer than the
others. A program's share may begin or end within a sequence: such parts go to a workspace, and the last
program of a sequence to arrive there joins them, always in the same order. A program has at most two such
parts: one that it continues, and one that it leaves unfinished.

Only the device reads lengths, and the grid depends on no length: a captured CUDA graph serves every mix of
lengths. All rows of a sequence, its queries with all query heads that share a KV head, stand in one tile, so
each K and V is read once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import (
    MIN_ROWS,
    Shape,
    base_two,
    next_power_of_two,
    window_size,
    window_start_of,
)
from baton_kernels.cuda.tiles import LOG2_E, accumulate, join, last_at_most, load_tile, window_start
from baton_kernels.paged import Chunk
from baton_kernels.window import ChunkedWindow, Window

MIN_SHARE = 4
"""Fewest tiles of a program: a shorter part costs more to merge than it saves."""
JOIN_STAGES = 2
"""Parts of a sequence that are under way from memory, while they are joined."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The distribution of one step's S sequences over programs; the same for all layers of one window."""

    tables: Tensor
    """[S, blocks] int64; [blocks of all sequences] where ``places`` says where each table begins."""
    contexts: Tensor
    """[S * queries] integers: tokens that each query sees; 0: the row is padding."""
    places: Tensor | None
    """[2, S] int32: each sequence's first row in the step, and where its table begins. None: the sequences'
    rows follow each other, ``queries`` each. With places, rows that see nothing are in no step."""
    starts: Tensor
    """[S + 1] int32: the index of each sequence's first tile among the tiles of all. Every sequence has at
    least one: one without context, as padding has it, gets zeros for its output."""
    arrivals: Tensor
    """[S * kv_heads] int32, all 0 between launches: the parts of each sequence that are ready."""
    window: Window | None
    queries: int
    """Rows of each sequence."""
    tile: int
    """Keys of a tile."""
    programs: int
    """The number of programs for each KV head."""

    @classmethod
    def build(
        cls,
        tables: Tensor,
        contexts: Tensor,
        window: Window | None,
        tile: int,
        programs: int,
        kv_heads: int,
    ) -> DecodePlan:
        """Plans sequences whose rows follow each other, by operations of the device alone: nothing waits for
        it, and a graph can hold it. ``tile``: keys per tile (``Shape.decode_tile``)."""
        sequences = tables.shape[0]
        queries = contexts.numel() // max(1, sequences)
        most = contexts if queries == 1 else contexts.view(sequences, queries).amax(1)
        tiles = (most + (tile - 1)) // tile
        if window is not None:
            least = most
            if queries > 1:
                seeing = contexts.view(sequences, queries)
                least = torch.where(seeing > 0, seeing, most[:, None]).amin(1)
            tiles = tiles - window_start_of(least, window).clamp(min=0) // tile
        zeros = torch.zeros(sequences * (kv_heads + 1) + 1, dtype=torch.int32, device=contexts.device)
        starts, arrivals = zeros.split_with_sizes((sequences + 1, sequences * kv_heads))
        torch.cumsum(tiles.clamp(min=1), 0, dtype=torch.int32, out=starts[1:])
        return cls(tables, contexts, None, starts, arrivals, window, queries, tile, programs)


@dataclass(frozen=True, slots=True)
class ShortChunks:
    """Chunks of a few queries, anywhere in a step, as the host describes them."""

    chunks: Sequence[tuple[Chunk, int]]
    """Each with the place where its table begins."""
    queries: int
    """Rows of each sequence: as many as a tile holds, so that lengths in between need no other kernel."""
    tile: int
    """Keys of a tile."""
    windows: Collection[Window | None]

    @classmethod
    def of(
        cls, chunks: Sequence[tuple[Chunk, int]], group: int, tile: int, windows: Collection[Window | None]
    ) -> ShortChunks:
        longest = max(chunk.length for chunk, _ in chunks)
        rows = max(MIN_ROWS, next_power_of_two(longest * group))
        return cls(chunks, rows // group, tile, windows)

    @property
    def numbers(self) -> list[int]:
        """``DecodePlan.contexts``, ``places``, and ``starts`` for each window, behind each other."""
        contexts: list[int] = []
        for chunk, _ in self.chunks:
            contexts += range(chunk.context - chunk.length + 1, chunk.context + 1)
            contexts += [0] * (self.queries - chunk.length)
        places = [chunk.start for chunk, _ in self.chunks] + [begin for _, begin in self.chunks]
        return contexts + places + [start for window in self.windows for start in self._starts(window)]

    def _starts(self, window: Window | None) -> Iterator[int]:
        """The index of each chunk's first tile, and the number of all tiles."""
        return itertools.accumulate((self._tiles(chunk, window) for chunk, _ in self.chunks), initial=0)

    def _tiles(self, chunk: Chunk, window: Window | None) -> int:
        first = chunk.context - chunk.length + 1
        unseen = 0 if window is None else max(0, window_start_of(first, window))
        return -(-chunk.context // self.tile) - unseen // self.tile

    def plans(
        self, described: Tensor, tables: Tensor, programs: int, kv_heads: int
    ) -> Mapping[Window | None, DecodePlan]:
        """The plans by window. ``described``: the ``numbers``, on the device; ``tables``: [blocks of all
        sequences]."""
        count = len(self.chunks)
        sizes = [count * self.queries, 2 * count, *[count + 1] * len(self.windows)]
        contexts, places, *starts = described.split_with_sizes(sizes)
        # Launches follow each other, and leave it zeroed: all windows have the same.
        arrivals = torch.zeros(count * kv_heads, dtype=torch.int32, device=described.device)
        return {
            window: DecodePlan(
                tables, contexts, places, own, arrivals, window, self.queries, self.tile, programs
            )
            for window, own in zip(self.windows, starts, strict=True)
        }


@bound
@triton.jit(
    do_not_specialize=["layer", "sequences", "queries", "window", "table_stride"],
    do_not_specialize_on_alignment=["tables", "contexts", "places", "starts", "arrivals", "sinks"],
)
def _decode(
    q: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    places: tl.tensor,
    starts: tl.tensor,
    arrivals: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_totals: tl.tensor,
    layer: tl.tensor,
    sequences: tl.tensor,
    queries: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    value_scale: tl.tensor,
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
    JOIN_STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
    PLACED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    all_tiles = tl.load(starts + sequences)
    share = tl.maximum(tl.cdiv(all_tiles, tl.num_programs(0)), SHARE)
    begin = program * share
    stop = tl.minimum(begin + share, all_tiles)
    if begin >= stop:
        return
    members = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    number = members // GROUP
    head = kv_head * GROUP + members % GROUP
    rows = queries * GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
    pool_head = pool + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * layer_stride
    sequence = last_at_most(starts, sequences, begin, 0)
    at = begin
    while at < stop:
        first = tl.load(starts + sequence)
        last = tl.load(starts + sequence + 1)
        until = tl.minimum(last, stop)
        own = members < rows
        if SINGLE:
            context = tl.load(contexts + sequence).to(tl.int32)
            seeing = tl.full([ROWS], 0, tl.int32) + context
            least = context
        else:
            seeing = tl.load(contexts + sequence * queries + number, mask=own, other=0).to(tl.int32)
            context = tl.max(seeing, 0)
            least = tl.min(tl.where(seeing > 0, seeing, context), 0)
        low = 0
        if HAS_WINDOW:
            low = tl.maximum(window_start(least, window, CHUNKED), 0)
        if PLACED:
            own = own & (seeing > 0)
            row = tl.load(places + sequence) + number
            table = tables + tl.load(places + sequences + sequence)
        else:
            row = sequence * queries + number
            table = tables + sequence.to(tl.int64) * table_stride
        row = row.to(tl.int64)
        real = own[:, None] & (dims < HEAD_DIM)[None, :]
        shift = low // TILE - first
        query = tl.load(q + (row * q_token + head * q_head)[:, None] + dims[None, :], mask=real, other=0.0)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:  # counted in the part that begins a sequence; in others, 1 over 2**-inf is nothing
            peak = tl.where(at == first, sink, peak)
            total += 1.0
        for tile in range(at + shift, until + shift):
            k, v = load_tile(
                pool_head, table, tile, low, context, block_stride, BLOCK_SIZE, HEAD_DIM, TILE, DIMS, True
            )
            token = (tile * TILE + tl.arange(0, TILE))[None, :]
            if SINGLE:
                seen = (token >= low) & (token < context)
            else:
                seen = token < seeing[:, None]
                if HAS_WINDOW:
                    seen = seen & (token >= window_start(seeing, window, CHUNKED)[:, None])
            acc, peak, total = accumulate(
                acc, peak, total, query, k, v, seen, scale, softcap, HAS_SOFTCAP, True, PRECISION
            )
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if pool.dtype.element_ty.primitive_bitwidth == 8:
            acc *= value_scale
        target = out + ((row * (kv_heads * GROUP) + head) * HEAD_DIM)[:, None] + dims[None, :]
        if (at == first) & (until == last):
            tl.store(target, acc.to(out.dtype.element_ty), mask=real)
        else:
            part = ((2 * program + (at == first).to(tl.int32)) * kv_heads + kv_head) * rows + members
            tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
            tl.store(part_totals + part, peak + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=own)
            tl.debug_barrier()  # every thread's stores are before the arrival
            arrival = arrivals + sequence * kv_heads + kv_head
            begun = first // share
            ended = (last - 1) // share
            if tl.atomic_add(arrival, 1, sem="acq_rel") == ended - begun:
                # The first part is the one that its program leaves unfinished (slot 2p + 1); all others are
                # continued (slot 2p).
                step = 2 * kv_heads * rows
                base = begun * step + kv_head * rows
                acc = join(
                    parts, part_totals, base + kv_heads * rows, base, step, ended - begun + 1, own,
                    HEAD_DIM, ROWS, DIMS, JOIN_STAGES,
                )  # fmt: skip
                tl.store(target, acc.to(out.dtype.element_ty), mask=real)
                tl.store(arrival, 0)
        at = until
        sequence += 1


def decode_attention(
    pool: Tensor,
    layer: int,
    q: Tensor,
    out: Tensor,
    plan: DecodePlan,
    shape: Shape,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    value_scale: float = 1.0,
) -> None:
    """q [T, heads, head_dim] -> the plan's rows of ``out``, contiguous, of the same shape.
    ``scale`` and ``value_scale``: of products with keys, and of values, as they are stored."""
    _, heads, head_dim = q.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    rows = heads * plan.queries
    parts = torch.empty((2 * plan.programs, rows, head_dim), dtype=torch.float32, device=q.device)
    part_totals = torch.empty((2 * plan.programs, rows), dtype=torch.float32, device=q.device)
    tiling = shape.decode(group, plan.queries)
    placed = plan.places is not None
    _decode[(plan.programs, kv_heads)](
        q,
        pool,
        plan.tables,
        plan.contexts,
        plan.starts if plan.places is None else plan.places,
        plan.starts,
        plan.arrivals,
        part_totals if sinks is None else sinks,
        out,
        parts,
        part_totals,
        layer,
        plan.starts.numel() - 1,
        plan.queries,
        window_size(plan.window),
        *base_two(scale, softcap),
        value_scale,
        0 if placed else plan.tables.stride(0),
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
        JOIN_STAGES=JOIN_STAGES,
        SINGLE=plan.queries == 1 and not placed,
        PLACED=placed,
        HAS_WINDOW=plan.window is not None,
        CHUNKED=isinstance(plan.window, ChunkedWindow),
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION=shape.precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=255,  # or the assembler spills a few bytes, where that lets one more program run beside
        enable_fp_fusion=True,
    )
