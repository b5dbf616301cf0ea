"""Steps of ragged batches over shuffled blocks of a pool of latents, for the tests of their attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.paged import PagedBatch
from tests.support.paged_steps import Case, lay_out

LAYERS = 3
LAYER = 1


@dataclass(frozen=True)
class LatentCase:
    heads: int
    width: int
    value_dim: int
    block_size: int
    decode: tuple[int, ...]
    """Context of each decoding sequence."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(tokens cached before, length) of each chunk."""
    dtype: torch.dtype = torch.float32
    queries: int = 1
    """See ``Case``."""

    @property
    def scale(self) -> float:
        return float(self.width**-0.5)


@dataclass(frozen=True)
class LatentStep:
    """A step, and queries of all its rows."""

    view: Tensor
    """[blocks, 1, layers, 1, block_size, width]: NaN wherever no token of the step's sequences is."""
    batch: PagedBatch
    q: Tensor
    """[T, heads, width]."""
    latents: Tensor
    """[T, width]: those that the view has in the slots of the step's own tokens."""


def step_of(case: LatentCase) -> LatentStep:
    """Numbers whose scores spread."""
    paged = Case(
        1, 1, case.width, case.block_size, None, case.decode, case.chunks, case.dtype, queries=case.queries
    )
    pool, batch = lay_out(paged, layers=LAYERS)
    source = pool[:, :, :, :1]
    view = torch.full_like(source, torch.nan, memory_format=torch.contiguous_format)
    owners = [(batch.row_tables[row], int(seen)) for row, seen in enumerate(batch.decode_contexts)]
    for table, context in owners + [(chunk.table, chunk.context) for chunk in batch.chunks]:
        tokens = torch.arange(context)
        blocks, offsets = table[tokens // case.block_size], tokens % case.block_size
        view[blocks, :, LAYER, :, offsets] = source[blocks, :, LAYER, :, offsets]
    q = 2 * torch.randn(len(batch.positions), case.heads, case.width)
    own = view[batch.slot_blocks, 0, LAYER, 0, batch.slot_offsets]
    return LatentStep(view, batch, q.to(case.dtype), own)
