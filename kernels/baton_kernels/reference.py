"""What the attention kernels must compute, written to be read: float64, one token and one head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.paged import PagedBatch


def reference_write_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, batch: PagedBatch) -> None:
    """Store k and v, both [T, kv_heads, head_dim], slot by slot."""
    places = zip(batch.slot_blocks.tolist(), batch.slot_offsets.tolist(), strict=True)
    for token, (block, offset) in enumerate(places):
        pool[block, :, layer, 0, offset] = k[token]
        pool[block, :, layer, 1, offset] = v[token]


def reference_attention(
    pool: Tensor,
    layer: int,
    q: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """q [T, heads, head_dim] -> [T, heads, head_dim] float64; rows of no sequence stay 0."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, (table, context) in _rows(batch).items():
        first = 0 if window is None else max(0, context - window)
        k, v = (_read(pool, layer, part, table, first, context) for part in (0, 1))
        for head in range(q.shape[1]):
            kv_head = head * pool.shape[1] // q.shape[1]
            scores = k[:, kv_head] @ q[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = torch.softmax(scores, dim=0) @ v[:, kv_head]
    return out


def _rows(batch: PagedBatch) -> dict[int, tuple[list[int], int]]:
    """Row of the step -> the block table of its sequence and the number of tokens it sees."""
    rows = {
        row: (batch.decode_tables[row].tolist(), int(batch.decode_contexts[row]))
        for row in range(batch.num_decode)
    }
    for chunk in batch.chunks:
        for index in range(chunk.length):
            rows[chunk.start + index] = (chunk.table.tolist(), chunk.context - chunk.length + index + 1)
    return rows


def _read(pool: Tensor, layer: int, part: int, table: list[int], first: int, stop: int) -> Tensor:
    """K (part 0) or V (part 1) of tokens first..stop-1, [tokens, kv_heads, head_dim] float64."""
    block_size = pool.shape[4]
    tokens = torch.arange(first, stop, device=pool.device)
    blocks = torch.tensor(table, device=pool.device)[tokens // block_size]
    return pool[:, :, layer, part][blocks, :, tokens % block_size].double()
