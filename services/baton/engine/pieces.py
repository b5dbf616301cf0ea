"""Steps with prompts as CUDA graphs in pieces, between which the host launches attention.

All of a step but its attention depends on the number of its tokens alone. So that is recorded, padded to a
few numbers of tokens, with a cut at each layer's attention: the queries go to a buffer that stays where it
is, and the results are read from another. Which prompts, chunks and decoding sequences make up a step, only
attention has to know, and attention is planned for each step as without recordings. The host then launches
L + 1 graphs and the attention of L layers, where it launched some ten kernels a layer.

A padded row is a token that nobody reads: its K and V go to a block that belongs to nobody, and attention
leaves out what stands in its row of the buffer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.graphs import Recording, check_replay, graph_sizes
from baton.engine.model import Model
from baton_kernels.attention import AttentionPlan
from baton_kernels.kv_fp8 import UNSCALED, KVScales
from baton_kernels.kv_layout import KVLayout
from baton_kernels.paged import PagedBatch, PagedTables, Planner
from baton_kernels.rotary import HeadNorm
from baton_kernels.step_attention import StepAttention
from baton_kernels.window import Window

_SMALLEST = 8


class PieceRecorder(Protocol):
    """A recorder of what is launched between ``begin`` and ``end``, within a ``step``."""

    def step(self) -> AbstractContextManager[None]:
        """The context in which the pieces of one step are recorded, one after the other."""
        ...

    def begin(self) -> None: ...

    def end(self) -> Recording: ...


def piece_sizes(most: int) -> tuple[int, ...]:
    """Tokens of the steps to record where a step has up to ``most``, ascending."""
    return tuple(size.rows for size in graph_sizes(most) if size.rows >= _SMALLEST)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one layer's attention that are the same in every step."""

    table: int
    """The table whose pages have the layer's K and V."""
    layer: int
    """The layer's index in these pages."""
    scale: float
    window: Window | None
    softcap: float | None
    sinks: Tensor | None
    scales: KVScales


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The pieces of a step, and the attention between each two of them."""

    pieces: list[Recording] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)

    def replay(self, attend: Callable[[AttentionCall], object]) -> None:
        for piece, call in zip(self.pieces, self.calls, strict=False):
            piece.replay()
            attend(call)
        self.pieces[-1].replay()


class TokenBuffers:
    """The inputs of a step that each token has, at fixed addresses."""

    def __init__(self, tokens: int, scratch: int, device: torch.device, num_tables: int = 1) -> None:
        """Buffers for up to ``tokens`` tokens. ``scratch``: the block that padded rows write to."""
        self._columns = torch.zeros((4, tokens), dtype=torch.int64, device=device)
        """[4, M]: token, position, block and offset of each row."""
        self._tables = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._more_slots = torch.zeros((num_tables - 1, tokens), dtype=torch.int64, device=device)
        """[tables - 1, M]: the pages of each row in the tables behind the first."""
        self._scratch = scratch
        self._columns[2] = self._more_slots[:] = scratch

    def fill(self, token_ids: Tensor, batch: PagedBatch, size: int) -> None:
        """Copy a step in, padded to ``size`` tokens."""
        rows = len(token_ids)
        step = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets)
        self._columns[:, :rows] = torch.stack(step)
        for slots, more in zip(self._more_slots, batch.more, strict=True):
            slots[:rows] = more.slot_blocks
        if rows < size:
            padding = self._columns[:, rows:size]
            padding.zero_()
            padding[2] = self._scratch
            self._more_slots[:, rows:size] = self._scratch

    def step(self, size: int, planner: Planner) -> tuple[Tensor, PagedBatch]:
        """Return tokens and description of a step of ``size`` tokens, as views of the buffers. Its attention
        is what ``planner`` makes of it."""
        token_ids, positions, blocks, offsets = self._columns[:, :size]
        no_context = positions[:0]
        more = tuple(PagedTables(slots[:size], self._tables, ()) for slots in self._more_slots)
        batch = PagedBatch(
            positions, blocks, offsets, 0, self._tables, no_context, (), planner=planner, more=more
        )
        return token_ids, batch


class CutAttention:
    """The attention of a step that is being recorded: each layer's is a cut between two pieces."""

    def __init__(
        self, table: int, slots: StepAttention, cut: Callable[[Tensor, AttentionCall], Tensor]
    ) -> None:
        """``slots`` stores K and V. ``cut`` takes the queries [T, heads, head_dim], and returns where the
        result will be."""
        self._table = table
        self._slots = slots
        self._cut = cut

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, scales: KVScales = UNSCALED) -> None:
        self._slots.write_kv(pool, layer, k, v, scales)

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
        return self._slots.rotate_and_store(pool, layer, qkv, cos=cos, sin=sin, norm=norm, scales=scales)

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
        del pool
        assert out is None, "a model leaves the memory to the plan"
        return self._cut(q, AttentionCall(self._table, layer, scale, window, softcap, sinks, scales))


class PiecewiseModel:
    """A model whose steps with prompts are replayed in pieces; other steps are computed as by the model
    itself."""

    def __init__(
        self,
        model: Model,
        pool: Tensor,
        sizes: tuple[int, ...],
        record: PieceRecorder,
        layout: KVLayout | None = None,
    ) -> None:
        """Records a step of each of ``sizes`` tokens, the largest first: the smaller ones find room in its
        memory. ``pool`` has one block, its last, that only the padding uses. ``layout``: of the pool's pages,
        which hold K and V alone (:meth:`suits`); None: a page is a block.

        Steps of more tokens, without a prompt's chunks or with ``PagedBatch.lengths`` are not replayed.
        """
        self.model = model
        self._sizes = sizes
        self._layout = layout
        num_tables = 1 if layout is None else layout.num_tables
        self._buffers = TokenBuffers(sizes[-1], pool.shape[0] - 1, pool.device, num_tables)
        self._windows: list[Collection[Window | None]] = []
        """The windows of each table's layers."""
        self._heads = 0
        self._queries: Tensor | None = None
        """The queries of the layer whose attention is next, [M, heads, head_dim]."""
        self._attended: Tensor | None = None
        """The result of the last attention, [M, heads, head_dim]."""
        self._hidden: Tensor | None = None
        """The hidden states of the last replay, [M, H]."""
        self._recorded: dict[int, RecordedStep] = {}
        for size in reversed(sizes):
            self._recorded[size] = self._record(size, pool, record)

    @staticmethod
    def suits(layout: KVLayout) -> bool:
        """Whether steps over such pages can be replayed in pieces."""
        return all(group.kind in ("full", "window") for group in layout.groups)

    def _views(self, pool: Tensor) -> list[Tensor]:
        """The pool as the blocks of each table."""
        if self._layout is None or pool.dim() > 2:
            return [pool]
        tables = range(self._layout.num_tables)
        return [pool.view(self._layout.view_shape(table, len(pool))) for table in tables]

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        size = self.size_for(token_ids, batch)
        if size is None:
            return self.model.forward(token_ids, batch, pool)
        assert self._queries is not None and self._attended is not None and self._hidden is not None
        rows = len(token_ids)
        self._buffers.fill(token_ids, batch, size)
        views = self._views(pool)
        plans = [
            AttentionPlan.build(batch.of_table(table), views[table], windows, self._heads).step
            for table, windows in enumerate(self._windows)
        ]
        queries, attended = self._queries[:rows], self._attended[:rows]

        def attend(call: AttentionCall) -> None:
            plans[call.table].attend(
                views[call.table],
                call.layer,
                queries,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks,
                scales=call.scales,
                out=attended,
            )

        self._recorded[size].replay(attend)
        # A copy: a caller that keeps it must not see the next step's.
        return self._hidden[:rows].clone() if batch.wanted is None else self._hidden[batch.wanted.rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def size_for(self, token_ids: Tensor, batch: PagedBatch) -> int | None:
        """Tokens of the recording that a step is padded to; None: the step is not replayed."""
        if not batch.chunks or batch.lengths is not None or len(token_ids) > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, len(token_ids))]

    def _record(self, size: int, pool: Tensor, record: PieceRecorder) -> RecordedStep:
        recorded = RecordedStep()
        with torch.inference_mode():
            self._run(
                size, pool, lambda _: None
            )  # before: kernels are built, libraries take their workspaces
            with record.step():
                record.begin()

                def cut(call: AttentionCall) -> None:
                    recorded.pieces.append(record.end())
                    recorded.calls.append(call)
                    record.begin()

                self._run(size, pool, cut)
                recorded.pieces.append(record.end())
            assert self._hidden is not None
            check_replay(lambda: recorded.replay(lambda _: None), self._hidden[:size])
        return recorded

    def _run(self, size: int, pool: Tensor, cut: Callable[[AttentionCall], None]) -> None:
        """Compute a step of the buffers' tokens, but for its attention. ``cut`` is called where each layer's
        should be."""

        def plan(
            batch: PagedBatch, pool: Tensor, windows: Collection[Window | None], heads: int
        ) -> StepAttention:
            table = len(self._windows)  # one is planned after the other
            self._windows.append(windows)
            self._heads = heads
            slots = AttentionPlan.build(replace(batch, planner=None), pool, windows, heads).step
            return CutAttention(table, slots, leave)

        def leave(queries: Tensor, call: AttentionCall) -> Tensor:
            if self._queries is None or self._attended is None:
                self._queries = torch.empty_like(queries, memory_format=torch.contiguous_format)
                self._attended = torch.zeros_like(self._queries)
            self._queries[:size] = queries
            cut(call)
            return self._attended[:size]

        self._windows = []
        token_ids, batch = self._buffers.step(size, plan)
        hidden = self.model.forward(token_ids, batch, pool)
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden[:size] = hidden
