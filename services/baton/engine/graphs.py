"""Decode steps as CUDA graphs: recorded once for a few sizes, then replayed with one call.

At small batches the host takes longer to launch some ten kernels a layer than the device to run them; a
graph's kernels follow each other without it. What is recorded is the model's forward pass, and with it all
addresses, shapes and grids. So a step is copied into buffers that stay where they are, and padded to the next
size that was recorded. A padded row has no context, for which attention reads nothing and yields zeros, and
its K and V go to a scratch block that belongs to nobody. The block tables are as wide as the longest
sequence, and neither the grid nor the workspace of attention depends on a length
(``baton_kernels.cuda.decode``), so a graph serves every mix of lengths.

:class:`GraphedModel` stands in for a model, and nothing else in the engine knows of graphs. Recording is
behind :class:`Record`, so that all but that is the same on a CPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton_kernels.paged import PagedBatch

LARGEST = 256
"""Rows of the largest graph. Beyond, a step takes the device longer than its launches take the host."""
_SMALL = (1, 2, 4)
_STEP = 8


class Model(Protocol):
    """What the engine needs of a model: see ``baton.engine.runner.Model``."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Recording(Protocol):
    def replay(self) -> None:
        """Does once more what was recorded."""
        ...


class Record(Protocol):
    """Records what a function launches. Its only result is what it writes to tensors that stay."""

    def __call__(self, run: Callable[[], None]) -> Recording: ...


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows of the graphs for steps of up to ``most`` sequences, ascending: padding adds seven at most."""
    sizes = (*_SMALL, *range(_STEP, LARGEST + 1, _STEP))
    return sizes[: bisect_left(sizes, min(most, LARGEST)) + 1]


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """The inputs of a decode step, at addresses that stay."""

    columns: Tensor
    """[5, M] int64: token, position, block, offset and context of each row."""
    tables: Tensor
    """[M, W] int64: block tables. What a row does not use may be any block's, as nobody reads it."""
    scratch: int
    """The block that padded rows write to."""

    @classmethod
    def allocate(cls, rows: int, width: int, scratch: int, device: torch.device) -> DecodeBuffers:
        """For up to ``rows`` sequences of up to ``width`` blocks."""
        buffers = cls(
            torch.zeros((5, rows), dtype=torch.int64, device=device),
            torch.zeros((rows, width), dtype=torch.int64, device=device),
            scratch,
        )
        buffers.pad(0, rows)
        return buffers

    def pad(self, start: int, stop: int) -> None:
        """Makes rows start..stop-1 ones of no sequence."""
        columns = self.columns[:, start:stop]
        columns.zero_()
        columns[2] = self.scratch

    def fill(self, token_ids: Tensor, batch: PagedBatch, size: int) -> None:
        """Takes over a decode step, padded to ``size`` rows."""
        rows = batch.num_decode
        step = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets, batch.decode_contexts)
        self.columns[:, :rows] = torch.stack(step)
        self.tables[:rows, : batch.decode_tables.shape[1]] = batch.decode_tables
        if rows < size:
            self.pad(rows, size)

    def step(self, size: int) -> tuple[Tensor, PagedBatch]:
        """Tokens and description of a step of ``size`` rows, as views of the buffers."""
        token_ids, positions, blocks, offsets, contexts = self.columns[:, :size]
        return token_ids, PagedBatch(positions, blocks, offsets, size, self.tables[:size], contexts, ())


class GraphedModel:
    """A model whose decode steps are replayed; all other steps it computes as ever."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        sizes: tuple[int, ...],
        width: int,
        record: Record,
    ) -> None:
        """Records a step of each of ``sizes``, the largest first: those that follow find room in its memory.

        ``pool`` has one block, its last, that nobody but this uses; ``width`` is the most blocks that a
        sequence can have. Steps of wider tables, of more rows, with a prompt's chunks or with
        ``PagedBatch.lengths`` are not replayed.
        """
        self.model = model
        self._sizes = sizes
        self._buffers = DecodeBuffers.allocate(sizes[-1], width, pool.shape[0] - 1, pool.device)
        self._hidden: Tensor | None = None
        """[M, H]"""
        self._recordings: dict[int, Recording] = {}
        for size in reversed(sizes):
            self._recordings[size] = self._record(size, pool, record)

    def _record(self, size: int, pool: Tensor, record: Record) -> Recording:
        token_ids, batch = self._buffers.step(size)

        def run() -> None:
            hidden = self.model.forward(token_ids, batch, pool)
            if self._hidden is None:
                self._hidden = torch.empty_like(hidden)
            self._hidden[:size] = hidden

        with torch.inference_mode():
            run()  # before anything is recorded: kernels are built, and libraries take their workspaces
            return record(run)

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        size = self.size_for(batch)
        if size is None or self._hidden is None:
            return self.model.forward(token_ids, batch, pool)
        self._buffers.fill(token_ids, batch, size)
        self._recordings[size].replay()
        # A copy, since who keeps it must not see the next step's.
        return self._hidden[: batch.num_decode].clone()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def size_for(self, batch: PagedBatch) -> int | None:
        """Rows of the recording that a step is padded to; None: it is not replayed."""
        rows = batch.num_decode
        if not 0 < rows <= self._sizes[-1] or batch.chunks or batch.lengths is not None:
            return None
        if batch.decode_tables.shape[1] > self._buffers.tables.shape[1]:
            return None
        return self._sizes[bisect_left(self._sizes, rows)]


class CudaRecord:
    """:class:`Record` by CUDA graphs. They share one pool of memory, as no two of them run at a time and what
    one leaves there is not read after another has run."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            run()
        return graph
