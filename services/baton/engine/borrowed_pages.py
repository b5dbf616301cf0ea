"""Pages of sequences that are made up to measure or to warm up, while nobody owns any page."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from baton.engine.scheduler import Scheduled
from baton.engine.sequence import Sequence
from baton.engine.sequence_states import StateMove, StateRun
from baton_kernels.kv_layout import KVLayout


def borrow_pages(seq: Sequence, layout: KVLayout, num_blocks: int, num_pages: int) -> None:
    """Gives a sequence ``num_blocks`` blocks and a state in the first pages of a pool of ``num_pages``, over
    and over again if these are too few."""
    seq.lay_out(layout.num_tables)
    for number, table in enumerate(seq.tables):
        first = number * num_blocks
        table.extend(page % num_pages for page in range(first, first + num_blocks))
    first = layout.num_tables * num_blocks
    seq.state_pages = array("q", (page % num_pages for page in range(first, first + layout.state_pages)))


def moves_in_place(items: Iterable[Scheduled]) -> tuple[StateMove, ...]:
    """The moves of a step that overwrites the states of its sequences, if they have any."""
    return tuple(
        StateMove(
            item.sequence,
            item.sequence.state_pages if item.start else array("q"),
            (StateRun(item.num_new, item.sequence.state_pages),),
            array("q"),
            0,
        )
        for item in items
        if item.sequence.state_pages
    )
