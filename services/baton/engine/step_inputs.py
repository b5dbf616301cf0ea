"""A scheduled batch laid out for the model and the sampler, in one buffer that goes to the device at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.scheduler import Scheduled, ScheduledBatch
from baton.engine.sequence import Sequence
from baton.engine.step import DraftRows, StepTensors
from baton.engine.verification import Drafted
from baton.parallel.messages import StepLayout
from baton_kernels.kv_layout import KVLayout
from baton_kernels.paged import PagedTables, StateRows
from baton_kernels.transfers import host_buffer


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A run of rows that yield the log-probabilities of the prompt tokens behind them."""

    sequence: Sequence
    start: int
    """The first row's index in the step."""
    token_ids: list[int]
    """The prompt token that follows each row."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, laid out for the model and the sampler."""

    layout: StepLayout
    buffer: Tensor
    """The step's buffer on the host; ``StepTensors`` names its parts."""
    due: tuple[Sequence, ...]
    """Sequences without drafts whose last token is in the step, so that it yields their next one. Their rows
    come first."""
    drafted: tuple[Drafted, ...]
    """Sequences with drafts behind their last token: one row each, and another for each draft."""
    prompts: tuple[PromptRows, ...] = ()


class KeptTables:
    """One of the tables of the rows that decoded last. From step to step few of them change, and rarely in
    more than a block."""

    def __init__(self, table: int = 0) -> None:
        self._table = table
        self._rows = np.zeros((0, 0), np.int64)
        self._known: list[tuple[Sequence | None, int, int]] = []
        """Each row's sequence, the number of its blocks, and ``Sequence.num_block_changes``."""

    def fill(self, tables: NDArray[np.int64], sequences: Items[Sequence]) -> None:
        """Fill [n, width] tables, one row for each sequence, with zeros behind its blocks."""
        count, width = tables.shape
        self._reserve(count, width)
        known, rows = self._known, self._rows
        for at, seq in enumerate(sequences):
            owner, length, changes = known[at]
            own = table_of(seq, self._table)
            now = len(own)
            if owner is not seq or changes != seq.num_block_changes:
                rows[at, :now] = np.frombuffer(own, np.int64)
                rows[at, now:] = 0
            elif now != length:
                rows[at, length:now] = own[length:]
            else:
                continue
            known[at] = (seq, now, seq.num_block_changes)
        tables[:] = rows[:count, :width]

    def _reserve(self, count: int, width: int) -> None:
        rows, columns = self._rows.shape
        if count > rows or width > columns:
            larger = np.zeros((max(count, rows), max(width + width // 2, columns)), np.int64)
            larger[:rows, :columns] = self._rows
            self._rows = larger
        del self._known[count:]
        self._known += [(None, 0, 0)] * (count - len(self._known))


class StepBuilder:
    """Lays out the steps of one pool. Work per sequence is a few array operations; nothing is done per
    token."""

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        with_lengths: bool,
        layout: KVLayout | None = None,
    ) -> None:
        """``with_lengths``: the model wants ``PagedBatch.lengths``. ``layout``: of the pool's pages; None: a
        page is a block of all layers."""
        self._block_size = block_size
        self._device = device
        self._with_lengths = with_lengths
        layout = layout or KVLayout.of_one(block_size)
        self._state_pages = layout.state_pages
        self._has_windows = any(group.kind == "window" for group in layout.groups)
        self._tables = KeptTables()
        self._more_tables = tuple(KeptTables(table) for table in range(1, layout.num_tables))
        self.draft_rows: DraftRows | None = None
        """The layout of steps that verify drafts and compute nothing else, where they are worth its padding.
        In others, and if this is None, drafts are chunks."""

    def build(
        self, batch: ScheduledBatch, places: Mapping[Sequence, int], every_row: bool, question: int = 0
    ) -> StepInputs:
        """Lay a batch out. ``places``: where the step before chooses the token of each sequence, for those of
        which it is not here yet. ``every_row``: whether the hidden states of all rows are wanted.
        ``question``: what other ranks answer if the step makes no logits."""
        if self.draft_rows is not None and self._verifies(batch, self.draft_rows):
            return self._build_padded(batch, self.draft_rows)
        singles = batch.items[: batch.num_single]
        chunks = batch.items[batch.num_single :]
        due, drafted, rows = _due(batch)
        prompts = _prompt_rows(batch)
        owners = [*due, *(seq for seq, drafts in drafted for _ in range(len(drafts) + 1))]
        pending = [
            (column, places[seq])
            for column, (seq, _, start, _) in enumerate(singles)
            if start >= len(seq.token_ids)
        ]
        layout = self._layout(batch, owners, prompts, len(pending), every_row, question)
        buffer = host_buffer(sum(layout.sizes), self._device)
        step = StepTensors.of(layout, buffer)
        columns = buffer[: 4 * layout.num_tokens].view(4, layout.num_tokens).numpy()
        tables, contexts = step.batch.decode_tables.numpy(), step.batch.decode_contexts.numpy()
        self._fill_singles(columns[:, : len(singles)], contexts, tables, singles)
        for item, chunk in zip(chunks, step.batch.chunks, strict=True):
            drafts = batch.drafts.get(item.sequence, ())
            own = columns[:, chunk.start : chunk.start + chunk.length]
            self._fill_chunk(own, chunk.table.numpy(), item, drafts)
        wanted = step.batch.wanted
        if wanted is not None:
            wanted.rows.numpy()[:] = rows
            self._fill_tables(wanted.tables.numpy(), owners)
        elif step.rows is not None:
            step.rows.numpy()[:] = rows
        _fill_copies(step, batch)
        if step.batch.lengths is not None:
            step.batch.lengths.numpy()[:] = _lengths(batch, columns[1])
        if step.pending is not None:
            step.pending[0].numpy()[:], step.pending[1].numpy()[:] = zip(*pending, strict=True)
        for table, more in enumerate(step.batch.more, 1):
            self._fill_more(more, table, batch, columns[1], owners)
        if step.batch.states is not None:
            _fill_states(step.batch.states, batch)
        return StepInputs(layout, buffer, due, drafted, prompts)

    def _layout(
        self,
        batch: ScheduledBatch,
        owners: list[Sequence],
        prompts: tuple[PromptRows, ...],
        num_pending: int,
        every_row: bool,
        question: int,
    ) -> StepLayout:
        """``owners``: the sequence of each row whose logits are made."""
        num_rows = len(owners)
        num_tokens = sum(item.num_new for item in batch.items)
        narrow = num_rows < num_tokens and not prompts and not every_row
        chunks = ((item.num_new, item.start + item.num_new) for item in batch.items[batch.num_single :])
        return StepLayout(
            num_tokens=num_tokens,
            num_decode=batch.num_single,
            width=max((len(item.sequence.block_ids) for item in batch.items[: batch.num_single]), default=0),
            chunks=tuple((num_new, context, -(-context // self._block_size)) for num_new, context in chunks),
            num_rows=num_rows,
            narrow=narrow,
            wanted_width=max((len(seq.block_ids) for seq in owners), default=0) if narrow else 0,
            num_copies=len(batch.copies),
            with_lengths=self._with_lengths,
            prompts=tuple((prompt.start, len(prompt.token_ids)) for prompt in prompts),
            # The arrival of logits tells that a step is over; without any, the ranks are asked.
            reply=0 if num_rows else question,
            num_pending=num_pending,
            num_tables=1 + len(self._more_tables),
            state_pages=self._state_pages,
            segments=tuple(_segments(batch)) if self._state_pages else (),
        )

    def _verifies(self, batch: ScheduledBatch, drafts: DraftRows) -> bool:
        """Whether a step verifies drafts and computes nothing else, so that it can be laid out as ``drafts``
        says and is worth its padding."""
        return (
            bool(batch.drafts)
            and not self._with_lengths
            and drafts.suits(len(batch.items), sum(item.num_new for item in batch.items))
            and all(
                item.num_new == 1 + len(batch.drafts.get(item.sequence, ())) <= drafts.queries
                and item.chooses
                and item.start < len(item.sequence.token_ids)
                for item in batch.items
            )
            and not _prompt_rows(batch)
        )

    def _build_padded(self, batch: ScheduledBatch, drafts: DraftRows) -> StepInputs:
        """Lays a batch out as ``drafts`` says. All rows that are no padding yield logits, in order."""
        sequences = [item.sequence for item in batch.items]
        num_rows = sum(item.num_new for item in batch.items)
        layout = StepLayout(
            num_tokens=len(sequences) * drafts.queries,
            num_decode=len(sequences) * drafts.queries,
            width=max(len(seq.block_ids) for seq in sequences),
            chunks=(),
            num_rows=num_rows,
            narrow=False,
            wanted_width=0,
            num_copies=len(batch.copies),
            with_lengths=False,
            prompts=(),
            decode_queries=drafts.queries,
            num_tables=1 + len(self._more_tables),
            state_pages=self._state_pages,
        )
        buffer = host_buffer(sum(layout.sizes), self._device)
        step = StepTensors.of(layout, buffer)
        columns = buffer[: 4 * layout.num_tokens].view(4, -1, drafts.queries).numpy()
        contexts = step.batch.decode_contexts.view(-1, drafts.queries).numpy()
        self._fill_decodes(step.batch.decode_tables.numpy(), 0, sequences)
        self._fill_padded(columns, contexts, step.batch.decode_tables.numpy(), batch, drafts)
        if step.rows is not None:
            step.rows.numpy()[:] = np.flatnonzero(contexts)
        _fill_copies(step, batch)
        for table, more in enumerate(step.batch.more, 1):
            self._fill_decodes(more.decode_tables.numpy(), table, sequences)
            more.slot_blocks.numpy()[:] = _padded_slots(
                more.decode_tables.numpy(), columns[1], contexts, self._block_size, drafts.scratch
            ).ravel()
        if step.batch.states is not None:
            _fill_padded_states(step.batch.states, batch, drafts.queries)
        due, drafted, _ = _due(batch)
        return StepInputs(layout, buffer, due, drafted)

    def _fill_padded(
        self,
        columns: NDArray[np.int64],
        contexts: NDArray[np.int64],
        tables: NDArray[np.int64],
        batch: ScheduledBatch,
        drafts: DraftRows,
    ) -> None:
        """Fills [4, n, queries] columns (token, position, block, offset) and [n, queries] contexts, by [n,
        width] tables."""
        columns[0] = 0
        for row, item in zip(columns[0], batch.items, strict=True):
            row[0] = item.sequence.token_ids[item.start]
            row[1 : item.num_new] = batch.drafts.get(item.sequence, ())
        starts, counts = np.array([(item.start, item.num_new) for item in batch.items]).T
        places = np.arange(drafts.queries)
        own = places < counts[:, None]
        columns[1] = np.where(own, starts[:, None] + places, 0)
        contexts[:] = np.where(own, columns[1] + 1, 0)
        columns[2] = _padded_slots(tables, columns[1], contexts, self._block_size, drafts.scratch)
        columns[3] = columns[1] % self._block_size

    def _fill_singles(
        self,
        columns: NDArray[np.int64],
        contexts: NDArray[np.int64],
        tables: NDArray[np.int64],
        singles: Items[Scheduled],
    ) -> None:
        """Fills [4, n] columns (token, position, block, offset), [n] contexts and [n, width] tables."""
        if not singles:
            return
        sequences = [item.sequence for item in singles]
        positions = [item.start for item in singles]
        columns[0] = [
            seq.token_ids[at] if at < len(seq.token_ids) else 0
            for seq, at in zip(sequences, positions, strict=True)
        ]
        columns[1] = positions
        contexts[:] = columns[1] + 1
        self._fill_decodes(tables, 0, sequences)
        columns[2] = tables[np.arange(len(singles)), columns[1] // self._block_size]
        columns[3] = columns[1] % self._block_size

    def _fill_chunk(
        self, columns: NDArray[np.int64], table: NDArray[np.int64], item: Scheduled, drafts: Items[int]
    ) -> None:
        """Fills [4, length] columns (token, position, block, offset) and the [blocks] table of one chunk."""
        seq, num_new, start, _ = item
        self._fill_table(table, seq, 0)
        own = num_new - len(drafts)
        columns[0, :own] = np.frombuffer(seq.token_ids, dtype=np.int64)[start : start + own]
        columns[0, own:] = drafts
        columns[1] = np.arange(start, start + num_new)
        columns[2] = table[columns[1] // self._block_size]
        columns[3] = columns[1] % self._block_size

    def _fill_decodes(self, tables: NDArray[np.int64], table: int, sequences: Items[Sequence]) -> None:
        """Fills [n, width] tables of the decoding sequences."""
        kept = self._more_tables[table - 1] if table else self._tables
        kept.fill(tables, sequences)
        if self._has_windows:
            np.maximum(tables, 0, out=tables)

    def _fill_table(self, pages: NDArray[np.int64], seq: Sequence, table: int) -> None:
        """Fills the [blocks] first pages of one table."""
        pages[:] = np.frombuffer(table_of(seq, table), dtype=np.int64)[: len(pages)]
        if self._has_windows:
            np.maximum(pages, 0, out=pages)

    def _fill_tables(self, tables: NDArray[np.int64], sequences: Items[Sequence], table: int = 0) -> None:
        """Fills [n, width] tables."""
        for row, seq in zip(tables, sequences, strict=True):
            self._fill_table(row[: len(seq.block_ids)], seq, table)

    def _fill_more(
        self,
        more: PagedTables,
        table: int,
        batch: ScheduledBatch,
        positions: NDArray[np.int64],
        owners: Items[Sequence],
    ) -> None:
        """Fills what a step of [T] positions has of one more table."""
        singles, chunks = batch.items[: batch.num_single], batch.items[batch.num_single :]
        slots, tables = more.slot_blocks.numpy(), more.decode_tables.numpy()
        places = positions // self._block_size
        if singles:
            self._fill_decodes(tables, table, [item.sequence for item in singles])
            slots[: len(singles)] = tables[np.arange(len(singles)), places[: len(singles)]]
        start = len(singles)
        for item, pages in zip(chunks, more.chunk_tables, strict=True):
            self._fill_table(pages.numpy(), item.sequence, table)
            end = start + item.num_new
            slots[start:end] = pages.numpy()[places[start:end]]
            start = end
        if more.wanted_tables is not None:
            self._fill_tables(more.wanted_tables.numpy(), owners, table)


def table_of(seq: Sequence, table: int) -> array[int]:
    """A table of a sequence, by its number."""
    return seq.more_tables[table - 1] if table else seq.block_ids


def _padded_slots(
    tables: NDArray[np.int64],
    positions: NDArray[np.int64],
    contexts: NDArray[np.int64],
    block_size: int,
    scratch: int,
) -> NDArray[np.int64]:
    """The pages that [n, queries] rows write to: of their sequences' tables or, if they are padding,
    ``scratch``."""
    pages = np.take_along_axis(tables, positions // block_size, axis=1)
    return np.where(contexts > 0, pages, scratch)


def _segments(batch: ScheduledBatch) -> Iterator[tuple[int, int]]:
    """First row and length of each run of a chunk behind which a state is kept."""
    start = batch.num_single
    for move in batch.moves[batch.num_single :]:
        for run in move.runs:
            yield start, run.num_tokens
            start += run.num_tokens


def _fill_states(states: StateRows, batch: ScheduledBatch) -> None:
    """Fills in the pages of a step's states; a state that is not there yet is named by -1."""
    singles, chunks = batch.moves[: batch.num_single], batch.moves[batch.num_single :]
    sources, targets = states.decode_sources.numpy(), states.decode_targets.numpy()
    for row, move in enumerate(singles):
        sources[row] = move.source if move.source else -1
        targets[row] = move.runs[0].target
    segments = iter(states.segments)
    for move in chunks:
        source = move.source
        for run, segment in zip(move.runs, segments, strict=False):
            segment.source.numpy()[:] = source if source else -1
            segment.target.numpy()[:] = run.target
            source = run.target


def _fill_padded_states(states: StateRows, batch: ScheduledBatch, queries: int) -> None:
    """Fills in the pages of the states of a step that verifies drafts, ``queries`` rows of each sequence."""
    sources = states.decode_sources.numpy()
    targets = states.decode_targets.numpy().reshape(len(batch.moves), queries, -1)
    targets[:] = -1
    for at, move in enumerate(batch.moves):
        sources[at] = move.source
        for row, run in enumerate(move.runs):
            targets[at, row] = run.target


def _fill_copies(step: StepTensors, batch: ScheduledBatch) -> None:
    if step.copies is not None:
        step.copies[0].numpy()[:] = [copy.source for copy in batch.copies]
        step.copies[1].numpy()[:] = [copy.target for copy in batch.copies]


def _lengths(batch: ScheduledBatch, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lengths for ``PagedBatch.lengths``, [T]."""
    prompts = np.repeat(
        [item.sequence.num_prompt for item in batch.items], [item.num_new for item in batch.items]
    )
    longest: NDArray[np.int64] = np.maximum(prompts, positions + 1)
    return longest


def _due(batch: ScheduledBatch) -> tuple[tuple[Sequence, ...], tuple[Drafted, ...], list[int]]:
    """The sequences that reach their last token in this step, the sequences that have drafts behind it, and
    the rows of these tokens and drafts."""
    due: list[Sequence] = []
    drafted: list[Drafted] = []
    rows: list[int] = []
    rows_drafted: list[int] = []
    end = 0
    for seq, num_new, _, chooses in batch.items:
        end += num_new
        drafts = batch.drafts.get(seq) if batch.drafts else None
        if drafts:
            drafted.append(Drafted(seq, drafts))
            rows_drafted += range(end - num_new, end)
        elif chooses:
            due.append(seq)
            rows.append(end - 1)
    return tuple(due), tuple(drafted), rows + rows_drafted


def _prompt_rows(batch: ScheduledBatch) -> tuple[PromptRows, ...]:
    """The rows of the step after which a prompt token's log-probability is asked for and not known yet."""
    found = []
    end = 0
    for seq, num_new, at, _ in batch.items:
        end += num_new
        if seq.params.prompt_logprobs is not None and seq.scores_prompt:
            stop = min(at + num_new, seq.num_prompt - 1)
            first = max(at, seq.num_scored)
            if first < stop:
                start = end - num_new + first - at
                found.append(PromptRows(seq, start, list(seq.prompt_ids[first + 1 : stop + 1])))
    return tuple(found)
