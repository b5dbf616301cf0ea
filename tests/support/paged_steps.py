"""Steps of ragged batches over shuffled blocks of a pool, for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.attention import new_pool
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.window import Window

LAYERS = 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: Window | None
    decode: tuple[int, ...]
    """Context of each decoding sequence."""
    chunks: tuple[tuple[int, int], ...]
    """(tokens cached before, length) of each chunk."""
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    queries: int = 1
    """Rows of each decoding sequence. With more than one, every other sequence has one row less, and behind
    its rows one of padding."""
    has_sinks: bool = False

    @property
    def decode_rows(self) -> tuple[tuple[int, int], ...]:
        """(first position, length) of each decoding sequence's own rows."""
        lengths = [self.queries - (at % 2 if self.queries > 1 else 0) for at in range(len(self.decode))]
        return tuple((n - length, length) for n, length in zip(self.decode, lengths, strict=True))


def sinks_of(case: Case) -> Tensor | None:
    """A sink for each query head, some of which outweigh a context and some of which do not."""
    return 4 * torch.randn(case.heads) if case.has_sinks else None


def lay_out(case: Case, layers: int = LAYERS, pool_on: str = "cpu") -> tuple[Tensor, PagedBatch]:
    """A pool of noise and a step over it, its sequences in shuffled blocks. ``pool_on``: the pool's device,
    where a large one is filled sooner."""
    contexts = [*case.decode, *(cached + length for cached, length in case.chunks)]
    sizes = [-(-context // case.block_size) for context in contexts]
    shape = (sum(sizes) + 1, case.kv_heads, layers, case.block_size, case.head_dim)
    pool = new_pool(*shape, dtype=case.dtype, device=torch.device(pool_on))
    pool.normal_()
    tables = torch.split(torch.randperm(sum(sizes)) + 1, sizes) if sizes else ()
    rows = [*case.decode_rows, *case.chunks]
    lengths = [case.queries] * len(case.decode) + [length for _, length in case.chunks]
    positions = torch.tensor(
        [
            first + min(at, own - 1)
            for (first, own), length in zip(rows, lengths, strict=True)
            for at in range(length)
        ],
        dtype=torch.int64,
    )
    owners = [table for table, length in zip(tables, lengths, strict=True) for _ in range(length)]
    blocks = [int(table[p // case.block_size]) for table, p in zip(owners, positions.tolist(), strict=True)]
    count = len(case.decode)
    padded = torch.zeros(count, max(sizes[:count], default=0), dtype=torch.int64)
    for row, table in enumerate(tables[:count]):
        padded[row, : table.numel()] = table
    decode = count * case.queries
    seen = [
        first + at + 1 if at < own else 0 for first, own in case.decode_rows for at in range(case.queries)
    ]
    starts = [decode + sum(length for _, length in case.chunks[:i]) for i in range(len(case.chunks))]
    chunks = tuple(
        Chunk(start, length, cached + length, table)
        for start, (cached, length), table in zip(starts, case.chunks, tables[count:], strict=True)
    )
    return pool, PagedBatch(
        positions=positions,
        slot_blocks=torch.tensor(blocks, dtype=torch.int64),
        slot_offsets=positions % case.block_size,
        num_decode=decode,
        decode_tables=padded,
        decode_contexts=torch.tensor(seen, dtype=torch.int64),
        chunks=chunks,
        decode_queries=case.queries,
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
    tables = [(batch.row_tables[i], int(n)) for i, n in enumerate(batch.decode_contexts)]
    for table, context in tables + [(chunk.table, chunk.context) for chunk in batch.chunks]:
        tokens = torch.arange(context)
        blocks, offsets = table[tokens // size], tokens % size
        spoilt[blocks, :, layer, :, offsets] = pool[blocks, :, layer, :, offsets]
    return spoilt
