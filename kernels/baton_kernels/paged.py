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
