"""The paged KV pool and the description of one step's tokens that every kernel works from.

The pool is one tensor per worker rank, blocks outermost, so that all layers of a block are one contiguous
message on the wire::

    [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size, head_dim]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from baton_kernels.step_attention import StepAttention
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
