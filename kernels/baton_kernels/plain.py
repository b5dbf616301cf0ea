"""Attention over the paged KV pool in plain torch, for any device and float type.

Decoding rows go through a few batched sets of operations, prompt chunks one by one. The parts that are the
same in every layer (which pool rows to read and write, the masks) are worked out once per step, in
``PlainPlan``.

The pool is only ever addressed through flat views, because gathering whole contiguous rows is a row copy,
while indexing the six dimensions is not (14 times slower on CPU):

- as [rows, block_size * head_dim], one row is the K or the V of a (block, kv_head, layer);
- as [rows * block_size, head_dim], one row is a slot of such a row.

Slots that no query sees may hold anything, also what is not a number: they are read as 0.

In both views, the rows of layer l lie ``l * 2`` rows (times block_size slots) after the rows of layer 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baton_kernels.kv_fp8 import FP8, UNSCALED, KVScales, as_stored, in_place
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.rotary import HeadNorm, normed_and_rotated
from baton_kernels.window import ChunkedWindow, Window

ROWS_PER_GROUP = 8
MAX_GROUPS = 4
"""Most groups of decoding rows. A group is padded to its longest context. On a CPU, where every byte gathered
counts, the rows are sorted by context into this many groups at most, of at least ``ROWS_PER_GROUP`` rows."""


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The reads of S decoding rows of similar contexts, under one window."""

    members: Tensor | None
    """[S] int64: the rows' indices among the step's decoding rows; None: all of them, in order."""
    rows: Tensor
    """[2, S, kv_heads, blocks] int64: rows of layer 0's K, then V."""
    mask: Tensor
    """[S, 1, 1, blocks * block_size] bool: which of the slots gathered each sequence sees."""


@dataclass(frozen=True, slots=True)
class ChunkView:
    """The reads of one chunk, under one window."""

    start: int
    length: int
    rows: Tensor
    """[2, kv_heads, blocks] int64: rows of layer 0's K, then V."""
    mask: Tensor | None
    """[length, blocks * block_size] bool; None: plainly causal from the first slot on."""


@dataclass(frozen=True, slots=True)
class PlainPlan:
    """One step's reads and writes of the pool, the same for all layers but for an offset."""

    write_slots: Tensor
    """[T * kv_heads] int64: the slot of layer 0's K of each (token, kv_head)."""
    num_decode: int
    decode: Mapping[Window | None, tuple[DecodeView, ...]]
    """The views of the decoding rows by window; empty without decoding rows."""
    chunks: Mapping[Window | None, tuple[ChunkView, ...]]
    """The views of the chunks by window."""

    @classmethod
    def build(cls, batch: PagedBatch, pool: Tensor, windows: Collection[Window | None]) -> PlainPlan:
        """Plans a step. ``windows``: the distinct windows of the model's layers (None: no window)."""
        _, kv_heads, layers, _, block_size, _ = pool.shape
        head_rows = torch.arange(kv_heads, device=pool.device) * (layers * 2)
        block_rows = kv_heads * layers * 2
        token_rows = batch.slot_blocks[:, None] * block_rows + head_rows
        write_slots = token_rows * block_size + batch.slot_offsets[:, None]
        reader = _Reader(head_rows, block_rows, block_size)
        groups = _groups(batch, block_size) if batch.num_decode else ()
        return cls(
            write_slots=write_slots.flatten(),
            num_decode=batch.num_decode,
            decode={w: tuple(reader.decode(group, w) for group in groups) for w in windows},
            chunks={w: tuple(reader.chunk(chunk, w) for chunk in batch.chunks) for w in windows},
        )

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, scales: KVScales = UNSCALED) -> None:
        block_size, head_dim = pool.shape[-2:]
        slots = in_place(pool).view(-1, head_dim)
        keys = self.write_slots + layer * 2 * block_size
        of_k, of_v = scales.factors
        slots.index_copy_(0, keys, as_stored(k, of_k, pool).reshape(-1, head_dim))
        slots.index_copy_(0, keys + block_size, as_stored(v, of_v, pool).reshape(-1, head_dim))

    def rotate_and_store(
        self,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        norm: HeadNorm | None,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        kv_heads = pool.shape[1]
        q, k, v = normed_and_rotated(qkv, qkv.shape[1] - 2 * kv_heads, kv_heads, cos, sin, norm)
        self.write_kv(pool, layer, k, v, scales)
        return q

    def attend(
        self,
        pool: Tensor,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        window: Window | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        scales: KVScales = UNSCALED,
        out: Tensor | None = None,
    ) -> Tensor:
        tokens, heads, head_dim = q.shape
        kv_heads = pool.shape[1]
        groups = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        scores = Scores(scale * scales.k, softcap)
        of_heads = None if sinks is None else sinks.view(kv_heads, -1, 1)
        for view in self.decode[window]:
            members = slice(self.num_decode) if view.members is None else view.members
            out[members] = _decode(pool, layer, groups[members], view, scores, of_heads).flatten(1, 2)
        for chunk in self.chunks[window]:
            rows = slice(chunk.start, chunk.start + chunk.length)
            out[rows] = _chunk(pool, layer, groups[rows], chunk, scores, of_heads).flatten(1, 2)
        return out if scales.v == 1 else out.mul_(scales.v)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decoding rows that are computed together, with their part of the batch's tables and contexts."""

    members: Tensor | None
    tables: Tensor
    contexts: Tensor


def _groups(batch: PagedBatch, block_size: int) -> tuple[_DecodeGroup, ...]:
    """The decoding rows by context, shortest first; one group on a device, where more would need a sync."""
    tables, contexts = batch.row_tables, batch.decode_contexts
    count = min(MAX_GROUPS, batch.num_decode // ROWS_PER_GROUP)
    if count < 2 or tables.device.type != "cpu":
        return (_DecodeGroup(None, tables, contexts),)
    groups = []
    for members in contexts.argsort().tensor_split(count):
        own = contexts[members]
        width = -(-int(own[-1]) // block_size)
        groups.append(_DecodeGroup(members, tables[members, :width], own))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Finds the rows that a query reads: under a window only the blocks that the window touches."""

    head_rows: Tensor
    block_rows: int
    block_size: int

    def decode(self, group: _DecodeGroup, window: Window | None) -> DecodeView:
        tables, contexts = group.tables, group.contexts
        keys = torch.arange(tables.shape[1] * self.block_size, device=tables.device)
        if window is None or _span(window) >= keys.numel():
            mask = keys < contexts[:, None]
            return DecodeView(group.members, self._rows(tables), mask[:, None, None])
        # As many tokens as a window straddle at most this many blocks.
        blocks = min((_span(window) + self.block_size - 2) // self.block_size + 1, tables.shape[1])
        oldest = _oldest(contexts - 1, window)
        first = oldest.clamp(min=0) // self.block_size
        columns = first[:, None] + torch.arange(blocks, device=tables.device)
        tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
        keys = first[:, None] * self.block_size + keys[: blocks * self.block_size]
        mask = (keys < contexts[:, None]) & (keys >= oldest[:, None])
        return DecodeView(group.members, self._rows(tables), mask[:, None, None])

    def chunk(self, chunk: Chunk, window: Window | None) -> ChunkView:
        cached = chunk.context - chunk.length
        windowed = window is not None and _span(window) < chunk.context
        first = 0 if window is None else max(0, _oldest(cached, window)) // self.block_size
        rows = self._rows(chunk.table[first:])
        if cached == 0 and not windowed:
            return ChunkView(chunk.start, chunk.length, rows, None)
        device = chunk.table.device
        queries = torch.arange(cached, chunk.context, device=device)[:, None]
        keys = torch.arange(first * self.block_size, chunk.table.numel() * self.block_size, device=device)
        mask = keys <= queries
        if window is not None:
            mask &= keys >= _oldest(queries, window)
        return ChunkView(chunk.start, chunk.length, rows, mask)

    def _rows(self, tables: Tensor) -> Tensor:
        """tables [..., blocks] -> [2, ..., kv_heads, blocks]."""
        keys = tables.unsqueeze(-2) * self.block_rows + self.head_rows[:, None]
        return torch.stack((keys, keys + 1))


def _span(window: Window) -> int:
    """The most tokens that a query sees."""
    return window.size if isinstance(window, ChunkedWindow) else window


Positions = TypeVar("Positions", int, Tensor)


def _oldest(positions: Positions, window: Window) -> Positions:
    """The first position that a query at each of ``positions`` sees; below 0: all before it."""
    if isinstance(window, ChunkedWindow):
        return positions // window.size * window.size
    return positions + 1 - window


@dataclass(frozen=True, slots=True)
class Scores:
    """The parameters that turn queries and keys into scores."""

    scale: float
    softcap: float | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """q [..., queries, head_dim], k and v [..., keys, head_dim] -> q's shape; without a mask, query i
        sees keys 0..i. ``sinks``: a further score, without a value, in the shape of a key's scores, [...,
        queries, 1], or one that expands to it."""
        if self.softcap is None and sinks is None:
            causal = mask is None
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)
        if mask is None:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = (q @ k.transpose(-2, -1)).float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[-2]]
        return weights.to(v.dtype) @ v


def _gather(pool: Tensor, layer: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [2, ..., blocks] -> K and V as they are stored, [2, ..., blocks * block_size, head_dim] of type
    ``dtype``."""
    block_size, head_dim = pool.shape[-2:]
    gathered = in_place(pool).view(-1, block_size * head_dim).index_select(0, (rows + layer * 2).flatten())
    if pool.dtype == FP8:
        gathered = gathered.view(FP8).to(dtype)
    return gathered.view(*rows.shape[:-1], rows.shape[-1] * block_size, head_dim)


def _decode(
    pool: Tensor, layer: int, q: Tensor, view: DecodeView, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """q [S, kv_heads, group, head_dim], sinks [kv_heads, group, 1] -> the shape of q.

    The query heads that share a kv head stand where the queries of one sequence usually do, so K and V are
    read once and never repeated.
    """
    gathered = _gather(pool, layer, view.rows, q.dtype).masked_fill_(~view.mask[:, 0, 0, None, :, None], 0)
    k, v = gathered
    return scores.attend(q, k, v, view.mask, sinks)


def _chunk(
    pool: Tensor, layer: int, q: Tensor, view: ChunkView, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """q [length, kv_heads, group, head_dim], sinks [kv_heads, group, 1] -> the shape of q. Repeated K and V
    are strides, not copies."""
    gathered = _gather(pool, layer, view.rows, q.dtype)
    if view.mask is None:
        gathered = gathered[..., : view.length, :]
    else:
        gathered.masked_fill_(~view.mask.any(0)[:, None], 0)
    k, v = gathered.unsqueeze(2)
    q = q.permute(1, 2, 0, 3)
    shape = (*q.shape[:2], *k.shape[2:])
    sinks = None if sinks is None else sinks.unsqueeze(-1)
    attended = scores.attend(q, k.expand(shape), v.expand(shape), view.mask, sinks)
    return attended.permute(2, 0, 1, 3)
