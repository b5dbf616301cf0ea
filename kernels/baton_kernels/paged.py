"""The paged KV pool and the description of one step's tokens that every kernel works from.

The pool is one tensor per worker rank, blocks outermost, so that all layers of a block are one contiguous
message on the wire::

    [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size, head_dim]

The pool of a model whose layers keep different things is [num_pages, numbers of a page]; each of its tables
sees it as such a tensor of its own (``baton_kernels.kv_layout``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from baton_kernels.step_attention import StepAttention
from baton_kernels.transfers import to_device
from baton_kernels.window import Window

LAYOUT = "block,kv_head,layer,kv,slot,dim"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's prompt that is computed in this step."""

    start: int
    """Row of the step's tokens where the chunk begins."""
    length: int
    context: int
    """Tokens the last row of the chunk sees, itself included: the tokens cached before plus ``length``."""
    table: Tensor
    """[ceil(context / block_size)] int64: the block ids that hold those tokens."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows of a step whose results are needed, where not all are. The rest of a prompt only leaves its K
    and V, so a model's last layer computes nothing for it behind them."""

    rows: Tensor
    """[R] int64, indices of the step's tokens."""
    tables: Tensor
    """[R, max_blocks] int64: the block table of each row's sequence, padded with block 0."""


@dataclass(frozen=True, slots=True)
class PagedTables:
    """What a step has of one more table, beside those fields of ``PagedBatch`` that name the pages of table
    0. Pages that no row sees any more, and padding, are 0."""

    slot_blocks: Tensor
    """[T] int64."""
    decode_tables: Tensor
    """[num_decode / decode_queries, max_blocks] int64."""
    chunk_tables: tuple[Tensor, ...]
    """[ceil(context / block_size)] int64, of each chunk."""
    wanted_tables: Tensor | None = None
    """[R, max_blocks] int64, if not all rows are wanted."""


@dataclass(frozen=True, slots=True)
class StateSegment:
    """A run of rows of one chunk after which its sequence's state is kept."""

    start: int
    """Row of the step's tokens where the run begins."""
    length: int
    source: Tensor
    """[pages] int64: where the state in front of the run is; negative: there is none, as the sequence
    begins."""
    target: Tensor
    """[pages] int64: where the state behind the run goes. It may be the source."""


@dataclass(frozen=True, slots=True)
class SegmentTables:
    """The S segments of a step, at least one, as kernels read them."""

    sources: Tensor
    """[S, pages] int64."""
    targets: Tensor
    """[S, pages] int64."""
    starts: Tensor
    """[S + 1] int32: the rows between the first segment's and each one's, and those of all."""

    @classmethod
    def of(cls, segments: Sequence[StateSegment]) -> SegmentTables:
        """Describe them on their device, without waiting for it."""
        sources, targets = [s.source for s in segments], [s.target for s in segments]
        starts = [0, *accumulate(s.length for s in segments)]
        described = to_device(torch.tensor(starts, dtype=torch.int32, device="cpu"), sources[0].device)
        if len(segments) == 1:
            return cls(sources[0][None], targets[0][None], described)
        return cls(torch.stack(sources), torch.stack(targets), described)


@dataclass(frozen=True, slots=True)
class StateRows:
    """The pages from which a step reads states, and those to which it writes them.

    Pages of a target are written whole. No page is a target twice, or both a target and the source of another
    sequence."""

    decode_sources: Tensor
    """[num_decode / decode_queries, pages] int64: the state in front of each decoding sequence's first row;
    negative: the sequence begins with it."""
    decode_targets: Tensor
    """[num_decode, pages] int64: where the state behind each decoding row goes; negative: nowhere, as the row
    is padding. With one row for each sequence it may be the source."""
    segments: tuple[StateSegment, ...]
    """The rows of the chunks, in order, each once. The source of a chunk's later segment is the target of the
    one before."""
    tables: SegmentTables | None = None
    """The segments as kernels read them; None: each layer's call describes them anew."""

    @property
    def segment_tables(self) -> SegmentTables:
        """The segments, of which there is at least one."""
        return self.tables or SegmentTables.of(self.segments)

    @property
    def described(self) -> StateRows:
        """The rows with their segments described as the kernels of all layers read them."""
        return replace(self, tables=SegmentTables.of(self.segments)) if self.segments else self


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The T tokens of one step: first the rows of each decoding sequence, then the prefill chunks.

    A decoding sequence has ``decode_queries`` rows, which follow each other: its last token, and behind it
    the drafts to be verified. A sequence of fewer has padding among its rows.
    """

    positions: Tensor
    """[T] int64: index of each token in its sequence."""
    slot_blocks: Tensor
    """[T] int64: block that receives the token's K and V."""
    slot_offsets: Tensor
    """[T] int64: slot within that block."""
    num_decode: int
    """Rows of the decoding sequences."""
    decode_tables: Tensor
    """[num_decode / decode_queries, max_blocks] int64, padded with block 0."""
    decode_contexts: Tensor
    """[num_decode] int64: tokens each decode row sees, itself included; 0: the row is padding."""
    chunks: tuple[Chunk, ...]
    lengths: Tensor | None = None
    """[T] int64: the sequence length that each token's rotary angles are for, the longer of its prompt and
    its position + 1. Only for models whose angles depend on it (dynamic NTK); None otherwise."""
    wanted: WantedRows | None = None
    """The rows whose results are needed; None: every row."""
    decode_queries: int = 1
    """Rows of each decoding sequence."""
    planner: Planner | None = None
    """What plans this step's attention, of the batch, the pool, the distinct windows and the query heads;
    None: ``AttentionPlan.build`` itself."""
    more: tuple[PagedTables, ...] = ()
    """The tables from table 1 on, of models whose blocks lie in several pages (``KVLayout``)."""
    states: StateRows | None = None
    """The states' pages, of models with layers that keep a state."""

    def of_table(self, table: int) -> PagedBatch:
        """The batch as the layers of one table see it."""
        if not self.more:
            return self
        if table == 0:
            return replace(self, more=(), states=None)
        own = self.more[table - 1]
        chunks = tuple(
            replace(chunk, table=pages) for chunk, pages in zip(self.chunks, own.chunk_tables, strict=True)
        )
        wanted = self.wanted
        if wanted is not None and own.wanted_tables is not None:
            wanted = replace(wanted, tables=own.wanted_tables)
        return replace(
            self,
            slot_blocks=own.slot_blocks,
            decode_tables=own.decode_tables,
            chunks=chunks,
            wanted=wanted,
            more=(),
            states=None,
        )

    @property
    def row_tables(self) -> Tensor:
        """[num_decode, max_blocks] int64, contiguous: the block table of each decode row."""
        if self.decode_queries == 1:
            return self.decode_tables
        rows = self.decode_tables[:, None].expand(-1, self.decode_queries, -1)
        # The tables of a single sequence would be flattened to a view, of one row again and again.
        return rows.flatten(0, 1).contiguous()

    def narrowed(self, wanted: WantedRows) -> PagedBatch:
        """The batch of the wanted rows alone, each as a decoding row: the tokens they attend to are in the
        pool."""
        positions = self.positions[wanted.rows]
        return PagedBatch(
            positions=positions,
            slot_blocks=self.slot_blocks[wanted.rows],
            slot_offsets=self.slot_offsets[wanted.rows],
            num_decode=len(wanted.rows),
            decode_tables=wanted.tables,
            decode_contexts=positions + 1,
            chunks=(),
        )


Planner: TypeAlias = Callable[[PagedBatch, Tensor, Collection[Window | None], int], StepAttention]
