"""One step's buffer as the model takes it: the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from baton.parallel.messages import StepLayout
from baton_kernels.paged import Chunk, PagedBatch, PagedTables, StateRows, StateSegment, WantedRows

PROMPT_ROWS = 64
"""Rows of a prompt whose logits are made at once: the logits of a whole chunk would outweigh its
activations."""


PADDED = 128
"""Rows up to which a step takes hardly longer than one of a single row, as its time is that of reading the
weights: padding costs nothing there."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The layout of a step that verifies drafts, where such steps are replayed: every sequence has as many
    rows, of which those that it has no token for are padding."""

    queries: int
    """Rows of each sequence: its last token and the most drafts behind it."""
    most: int
    """Most sequences of a step."""
    scratch: int
    """The block that padding writes to, which belongs to nobody."""

    def suits(self, sequences: int, num_tokens: int) -> bool:
        """Whether a step of these sequences, with so many tokens in all, is worth its padding."""
        return sequences <= self.most and sequences * self.queries <= max(PADDED, 2 * num_tokens)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The buffer's parts, by name."""

    token_ids: Tensor
    """[T] int64."""
    batch: PagedBatch
    rows: Tensor | None
    """[R] int64: the rows whose logits are made last; None: every row that the model yields, in order."""
    copies: tuple[Tensor, Tensor] | None
    """Sources and targets, [C] int64 each, of the blocks to copy before anything is computed."""
    pending: tuple[Tensor, Tensor] | None
    """Columns of ``token_ids``, [N] int64, whose tokens the step before chooses, and the places of these
    among its choices, [N] int64."""

    @classmethod
    def of(cls, layout: StepLayout, buffer: Tensor) -> StepTensors:
        """Names the parts of ``buffer`` ([sum of ``layout.sizes``] int64), as views of it."""
        parts = iter(buffer.split_with_sizes(layout.sizes))
        token_ids, positions, blocks, offsets, contexts, tables = islice(parts, 6)
        chunks = []
        start = layout.num_decode
        for (length, context, _), table in zip(layout.chunks, islice(parts, len(layout.chunks)), strict=True):
            chunks.append(Chunk(start, length, context, table))
            start += length
        rows, row_tables, sources, targets, lengths, columns, places = islice(parts, 7)
        row_tables = row_tables.view(layout.num_rows, layout.wanted_width)
        batch = PagedBatch(
            positions=positions,
            slot_blocks=blocks,
            slot_offsets=offsets,
            num_decode=layout.num_decode,
            decode_tables=tables.view(layout.num_decode // layout.decode_queries, layout.width),
            decode_contexts=contexts,
            chunks=tuple(chunks),
            lengths=lengths if layout.with_lengths else None,
            wanted=WantedRows(rows, row_tables) if layout.narrow else None,
            decode_queries=layout.decode_queries,
            more=tuple(_more_tables(layout, parts) for _ in range(layout.num_tables - 1)),
            states=_state_rows(layout, parts) if layout.state_pages else None,
        )
        # The rows are in order: without prompts under way the singles come first, then the drafted.
        every = layout.num_rows == layout.num_tokens
        copies = (sources, targets) if layout.num_copies else None
        pending = (columns, places) if layout.num_pending else None
        return cls(token_ids, batch, None if every or layout.narrow else rows, copies, pending)


def _more_tables(layout: StepLayout, parts: Iterator[Tensor]) -> PagedTables:
    slots, tables = islice(parts, 2)
    of_chunks = tuple(islice(parts, len(layout.chunks)))
    wanted = next(parts).view(layout.num_rows, layout.wanted_width)
    sequences = layout.num_decode // layout.decode_queries
    return PagedTables(
        slots, tables.view(sequences, layout.width), of_chunks, wanted if layout.narrow else None
    )


def _state_rows(layout: StepLayout, parts: Iterator[Tensor]) -> StateRows:
    sources, targets, segment_sources, segment_targets = (
        part.view(-1, layout.state_pages) for part in islice(parts, 4)
    )
    segments = tuple(
        StateSegment(start, length, source, target)
        for (start, length), source, target in zip(
            layout.segments, segment_sources, segment_targets, strict=True
        )
    )
    return StateRows(sources, targets, segments)


def prompt_pieces(hidden: Tensor) -> Iterator[Tensor]:
    """Rows of a prompt [R, H] in the pieces whose logits are made at once."""
    for at in range(0, len(hidden), PROMPT_ROWS):
        yield hidden[at : at + PROMPT_ROWS]
