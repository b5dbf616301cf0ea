"""Steps of ragged batches over shuffled blocks of a pool, for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.attention import new_pool
from baton_kernels.paged import Chunk, PagedBatch

LAYERS = 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    decode: tuple[int, ...]
    """Context of each decoding row."""
    chunks: tuple[tuple[int, int], ...]
    """(tokens cached before, length) of each chunk."""
    dtype: torch.dtype = torch.float32
    softcap: float | None = None


def lay_out(case: Case, layers: int = LAYERS) -> tuple[Tensor, PagedBatch]:
    """A pool of noise and a step over it, its sequences in shuffled blocks."""
    contexts = [*case.decode, *(cached + length for cached, length in case.chunks)]
    sizes = [-(-context // case.block_size) for context in contexts]
    shape = (sum(sizes) + 1, case.kv_heads, layers, case.block_size, case.head_dim)
    pool = new_pool(*shape, dtype=case.dtype, device=torch.device("cpu"))
    pool.normal_()
    tables = torch.split(torch.randperm(sum(sizes)) + 1, sizes) if sizes else ()
    rows = [(context - 1, 1) for context in case.decode] + list(case.chunks)
    positions = torch.cat(
        [torch.arange(first, first + length) for first, length in rows] or [torch.empty(0, dtype=torch.int64)]
    )
    owners = [table for table, (_, length) in zip(tables, rows, strict=True) for _ in range(length)]
    blocks = [int(table[p // case.block_size]) for table, p in zip(owners, positions.tolist(), strict=True)]
    decode = len(case.decode)
    padded = torch.zeros(decode, max(sizes[:decode], default=0), dtype=torch.int64)
    for row, table in enumerate(tables[:decode]):
        padded[row, : table.numel()] = table
    starts = [decode + sum(length for _, length in case.chunks[:i]) for i in range(len(case.chunks))]
    chunks = tuple(
        Chunk(start, length, cached + length, table)
        for start, (cached, length), table in zip(starts, case.chunks, tables[decode:], strict=True)
    )
    return pool, PagedBatch(
        positions=positions,
        slot_blocks=torch.tensor(blocks, dtype=torch.int64),
        slot_offsets=positions % case.block_size,
        num_decode=decode,
        decode_tables=padded,
        decode_contexts=torch.tensor(case.decode, dtype=torch.int64),
        chunks=chunks,
    )


def moved(pool: Tensor, batch: PagedBatch, device: torch.device) -> tuple[Tensor, PagedBatch]:
    """The same step on another device."""
    chunks = tuple(replace(chunk, table=chunk.table.to(device)) for chunk in batch.chunks)
    names = ("positions", "slot_blocks", "slot_offsets", "decode_tables", "decode_contexts")
    tensors = {name: getattr(batch, name).to(device) for name in names}
    return pool.to(device), replace(batch, chunks=chunks, **tensors)


def spoil_unused(pool: Tensor, batch: PagedBatch, layer: int) -> Tensor:
    """The pool with NaN wherever no token of the step's sequences is, and infinity in other layers."""
    spoilt = torch.full_like(pool, torch.nan)
    spoilt[:, :, torch.arange(pool.shape[2]) != layer] = torch.inf
    size = pool.shape[4]
    tables = [(batch.decode_tables[i], int(n)) for i, n in enumerate(batch.decode_contexts)]
    for table, context in tables + [(chunk.table, chunk.context) for chunk in batch.chunks]:
        tokens = torch.arange(context)
        blocks, offsets = table[tokens // size], tokens % size
        spoilt[blocks, :, layer, :, offsets] = pool[blocks, :, layer, :, offsets]
    return spoilt
