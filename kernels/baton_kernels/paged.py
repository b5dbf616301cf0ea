"""The paged KV pool and the description of one step's tokens that every kernel works from.

The pool is one tensor per worker rank, blocks outermost, so that all layers of a block are one contiguous
message on the wire::

    [num_blocks, num_kv_heads, num_layers, 2 (K, V), block_size, head_dim]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LAYOUT = "block,kv_head,layer,kv,slot,dim"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's prompt that is computed in this step."""

    start: int
    """Row of the step's tokens where the chunk begins."""
    length: int
    context: int
    """Tokens the last row of the chunk sees, itself included: those cached before plus ``length``."""
    table: Tensor
    """[ceil(context / block_size)] int64: the block ids that hold those tokens."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows of a step that something is made of, where that is not every row. The rest of a prompt only
    leaves its K and V, so a model's last layer has nothing to do for it behind them."""

    rows: Tensor
    """[R] int64, indices of the step's tokens."""
    tables: Tensor
    """[R, max_blocks] int64: the block table of each row's sequence, padded with block 0."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The T tokens of one step: first one row for each decoding sequence, then the prefill chunks."""

    positions: Tensor
    """[T] int64: index of each token in its sequence."""
    slot_blocks: Tensor
    """[T] int64: block that receives the token's K and V."""
    slot_offsets: Tensor
    """[T] int64: slot within that block."""
    num_decode: int
    decode_tables: Tensor
    """[num_decode, max_blocks] int64, padded with block 0."""
    decode_contexts: Tensor
    """[num_decode] int64: tokens each decode row sees, itself included."""
    chunks: tuple[Chunk, ...]
    lengths: Tensor | None = None
    """[T] int64: the sequence length that each token's rotary angles are for, the longer of its prompt and
    its position + 1. Only for models whose angles depend on it (dynamic NTK); None otherwise."""
    wanted: Wanted | None = None
    """None: every row."""

    def narrowed(self, wanted: Wanted) -> PagedBatch:
        """These rows alone, each as one that decodes: what they attend to is in the pool."""
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
