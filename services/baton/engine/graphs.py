"""Decode steps and verifications of drafts as CUDA graphs: recorded once for a few sizes, then replayed with
one call.

At small batches the host takes longer to launch some ten kernels a layer than the device to run them; a
graph's kernels follow each other without the host. A recording is the model's forward pass with all its
addresses, shapes and grids. So a step is copied into buffers that stay where they are, and padded to the next
size that was recorded. A padded row has no context, for which attention reads nothing and yields zeros, and
its K and V go to a scratch block that belongs to nobody. The block tables are as wide as the longest
sequence, and neither the grid nor the workspace of attention depends on a length
(``baton_kernels.cuda.decode``), so a graph serves every mix of lengths.

A step that verifies drafts has as many rows of each sequence as drafts are allowed, and one more; a sequence
of fewer drafts has padded rows among its own (:class:`baton.engine.step.DraftRows`).

:class:`GraphedModel` stands in for a model, and nothing else in the engine knows of graphs. Recording is
behind :class:`GraphRecorder`, so that everything else is the same on a CPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.defaults import LARGEST_GRAPH
from baton.engine.model import Model
from baton.engine.step import DraftRows
from baton_kernels.kv_layout import KVLayout
from baton_kernels.paged import PagedBatch, PagedTables, StateRows

_SMALL = (1, 2, 4)
_STEP = 8
_MANY, _LONG_STEP = 256, 16
"""Beyond so many rows, where a few more cost less of a step, sizes are further apart: each one is recorded at
the start, and its graph takes memory."""
_UNWRITTEN = 12288.0
"""A number that every dtype has, and no row of hidden states all over."""


class Recording(Protocol):
    def replay(self) -> None:
        """Launches once more what was recorded."""
        ...


class GraphRecorder(Protocol):
    """A recorder of what a function launches. The function's only result is what it writes to tensors that
    stay."""

    def __call__(self, run: Callable[[], None]) -> Recording: ...


class GraphSize(NamedTuple):
    """The size of a step that is recorded."""

    sequences: int
    queries: int = 1
    """Rows of each sequence."""

    @property
    def rows(self) -> int:
        return self.sequences * self.queries


def graph_sizes(most: int, queries: int = 1) -> tuple[GraphSize, ...]:
    """Sizes of the graphs for steps of up to ``most`` sequences, by their rows: padding adds seven sequences
    at most, and 15 beyond 256. With ``queries`` above 1 there are steps of as many rows of each sequence
    besides, as far as ``LARGEST_GRAPH`` goes."""
    counts = (*_SMALL, *range(_STEP, _MANY, _STEP), *range(_MANY, LARGEST_GRAPH + 1, _LONG_STEP))
    counts = counts[: bisect_left(counts, min(most, LARGEST_GRAPH)) + 1]
    sizes = [GraphSize(count) for count in counts]
    if queries > 1:
        sizes += [GraphSize(count, queries) for count in counts if count * queries <= LARGEST_GRAPH]
    return tuple(sorted(sizes, key=lambda size: (size.rows, size.queries)))


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """The inputs of a step, at fixed addresses."""

    columns: Tensor
    """[5, M] int64: token, position, block, offset and context of each row."""
    tables: Tensor
    """[tables, S, W] int64: the tables of the sequences. Entries that a sequence does not use may name any
    page: nothing reads them."""
    more_slots: Tensor
    """[tables - 1, M] int64: the pages of each row in the tables behind the first."""
    sources: Tensor
    """[S, pages] int64: see ``StateRows``; so are the targets."""
    targets: Tensor
    """[M, pages] int64."""
    scratch: int
    """The block that padded rows write to."""

    @classmethod
    def allocate(
        cls,
        sizes: Items[GraphSize],
        width: int,
        scratch: int,
        device: torch.device,
        layout: KVLayout | None = None,
    ) -> DecodeBuffers:
        """Buffers for steps of ``sizes``, with sequences of up to ``width`` blocks. ``layout``: of the pool's
        pages; None: a page is a block."""
        rows, sequences = max(size.rows for size in sizes), max(size.sequences for size in sizes)
        tables, states = (1, 0) if layout is None else (layout.num_tables, layout.state_pages)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        buffers = cls(
            zeros(5, rows),
            zeros(tables, sequences, width),
            zeros(tables - 1, rows),
            zeros(sequences, states) - 1,
            zeros(rows, states),
            scratch,
        )
        buffers.pad(0, rows)
        return buffers

    def pad(self, start: int, stop: int) -> None:
        """Makes rows start..stop-1 rows without a sequence."""
        columns = self.columns[:, start:stop]
        columns.zero_()
        columns[2] = self.scratch
        self.more_slots[:, start:stop] = self.scratch
        self.targets[start:stop] = -1

    def fill(self, token_ids: Tensor, batch: PagedBatch, size: GraphSize) -> None:
        """Copies a step in, padded to ``size``."""
        rows = batch.num_decode
        step = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets, batch.decode_contexts)
        self.columns[:, :rows] = torch.stack(step)
        sequences, width = batch.decode_tables.shape
        self.tables[0, :sequences, :width] = batch.decode_tables
        for at, more in enumerate(batch.more):
            self.more_slots[at, :rows] = more.slot_blocks
            self.tables[at + 1, :sequences, :width] = more.decode_tables
        if batch.states is not None:
            self.sources[:sequences] = batch.states.decode_sources
            self.targets[:rows] = batch.states.decode_targets
        if rows < size.rows:
            self.pad(rows, size.rows)

    def step(self, size: GraphSize) -> tuple[Tensor, PagedBatch]:
        """Tokens and description of a step of ``size``, as views of the buffers."""
        token_ids, positions, blocks, offsets, contexts = self.columns[:, : size.rows]
        tables = self.tables[:, : size.sequences]
        slots = self.more_slots[:, : size.rows]
        more = (PagedTables(*of_table, ()) for of_table in zip(slots, tables[1:], strict=True))
        states = None
        if self.sources.shape[1]:
            states = StateRows(self.sources[: size.sequences], self.targets[: size.rows], ())
        return token_ids, PagedBatch(
            positions,
            blocks,
            offsets,
            size.rows,
            tables[0],
            contexts,
            (),
            decode_queries=size.queries,
            more=tuple(more),
            states=states,
        )


class GraphedModel:
    """A model whose decode steps are replayed; other steps are computed as by the model itself."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        sizes: Items[GraphSize],
        width: int,
        record: GraphRecorder,
        layout: KVLayout | None = None,
    ) -> None:
        """Records a step of each of ``sizes``, which ascend by rows, the largest first: the smaller ones find
        room in its memory.

        ``pool`` has one block, its last, that only the padding uses; ``width`` is the most blocks that a
        sequence can have. Steps of wider tables, of more sequences or another number of rows for each, with a
        prompt's chunks or with ``PagedBatch.lengths`` are not replayed. ``layout``: of the pool's pages;
        None: a page is a block.
        """
        self.model = model
        self._counts = {
            queries: [size.sequences for size in sizes if size.queries == queries]
            for queries in {size.queries for size in sizes}
        }
        """Sequences of the recorded steps, ascending, by rows of each sequence."""
        self._buffers = DecodeBuffers.allocate(sizes, width, pool.shape[0] - 1, pool.device, layout)
        self._hidden: Tensor | None = None
        """The hidden states of the last replay, [M, H]."""
        self._recordings: dict[GraphSize, Recording] = {}
        for size in reversed(sizes):
            self._recordings[size] = self._record(size, pool, record)

    @property
    def draft_rows(self) -> DraftRows | None:
        """The layout in which steps with drafts are replayed; None: they are not."""
        queries = max(self._counts)
        return DraftRows(queries, self._counts[queries][-1], self._buffers.scratch) if queries > 1 else None

    def _record(self, size: GraphSize, pool: Tensor, record: GraphRecorder) -> Recording:
        token_ids, batch = self._buffers.step(size)

        def run() -> None:
            hidden = self.model.forward(token_ids, batch, pool)
            if self._hidden is None:
                self._hidden = torch.empty_like(hidden)
            self._hidden[: size.rows] = hidden

        with torch.inference_mode():
            run()  # before recording: kernels are built, and libraries take their workspaces
            recording = record(run)
            assert self._hidden is not None
            check_replay(recording.replay, self._hidden[: size.rows])
            return recording

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        size = self.size_for(batch)
        if size is None or self._hidden is None:
            return self.model.forward(token_ids, batch, pool)
        self._buffers.fill(token_ids, batch, size)
        self._recordings[size].replay()
        if batch.wanted is not None:
            return self._hidden[batch.wanted.rows]
        # A copy: a caller that keeps it must not see the next step's.
        return self._hidden[: batch.num_decode].clone()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def size_for(self, batch: PagedBatch) -> GraphSize | None:
        """Size of the recording that a step is padded to; None: the step is not replayed."""
        counts = self._counts.get(batch.decode_queries)
        if counts is None or batch.chunks or batch.lengths is not None:
            return None
        sequences, width = batch.decode_tables.shape
        if not 0 < sequences <= counts[-1] or width > self._buffers.tables.shape[2]:
            return None
        return GraphSize(counts[bisect_left(counts, sequences)], batch.decode_queries)


def check_replay(replay: Callable[[], None], written: Tensor) -> None:
    """Replays a recording once. RuntimeError if it leaves all of ``written``, which it should write to, as it
    was: kernels that went to another stream, or another device, than the one that was recorded are not in the
    graph."""
    written.fill_(_UNWRITTEN)
    replay()
    if (written == _UNWRITTEN).all():
        raise RuntimeError(
            f"a recorded step of {len(written)} rows does nothing when it is replayed; enforce_eager does "
            "without recordings"
        )


def recorder_of(device: torch.device) -> CudaRecord:
    """The recorder for steps on a device of CUDA, which must be the calling thread's own."""
    return CudaRecord(device)


class CudaRecord:
    """:class:`GraphRecorder`, and ``baton.engine.pieces.PieceRecorder``, by CUDA graphs of one device. The
    graphs share one pool of memory: no two run at a time, and what a step leaves there is not read after
    another has run."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        """The piece that is being recorded."""
        # Without a stream of its own, torch records on one of the device that was current at its first
        # graph.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # What other threads do on the device (copies, NCCL's watchdog) must not end the recording.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph

    @contextmanager
    def step(self) -> Iterator[None]:
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            graph, self._graph = self._graph, None
            if graph is not None:  # something failed: nothing else may be recorded into it
                with suppress(RuntimeError):
                    graph.capture_end()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self._memory, capture_error_mode="thread_local")

    def end(self) -> Recording:
        graph, self._graph = self._graph, None
        assert graph is not None, "begin goes before"
        graph.capture_end()
        return graph
