"""The places of the bytes of a group's wire block in its pages. Pure.

A wire block travels in one order, whatever its pages are like: ``[heads, layers, vectors, tokens, dim]`` of a
token group, ``[layers, units, size]`` of a state, each with the part that both ends have. Here it is cut into
*strips*, contiguous runs of bytes in that order, and into *rows* of one size, which a copy gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd

from baton.transport.base import GroupPart
from baton_kernels.kv_layout import KVGroup, KVLayout, StateKV, TokenKV


@dataclass(frozen=True, slots=True)
class Geometry:
    """The places of one group's wire blocks in pages."""

    width: int
    """Pages that a block lies in: the group's tables."""
    is_whole: bool
    """Whether a wire block is all tokens of its pages, so that the strips hold."""
    block_bytes: int
    strips: tuple[tuple[int, int, int], ...]
    """Table (counted from the group's first), offset in that table's page and length, in bytes, of each
    contiguous run, in the order of travel; of a whole block."""
    row_bytes: int
    rows: tuple[int, ...]
    """The rows of a block in the order of travel, each counted from the first of its page's."""
    tables: tuple[int, ...]
    """The table of each row's page."""
    rows_per_page: int


def whole_part(group: KVGroup) -> GroupPart:
    """All that a rank has of a group."""
    heads = group.kv.heads if isinstance(group.kv, TokenKV) else group.kv.units
    return GroupPart(range(heads), range(len(group.layers)))


def geometry_of(layout: KVLayout, group: KVGroup, part: GroupPart, ratio: int) -> Geometry:
    """The geometry of a part of a group whose blocks are divided into ``ratio`` wire blocks; a state's never
    is."""
    if isinstance(group.kv, StateKV):
        return _of_state(layout, group, group.kv, part)
    return _of_tokens(layout, group, group.kv, part, ratio)


def _of_tokens(layout: KVLayout, group: KVGroup, kv: TokenKV, part: GroupPart, ratio: int) -> Geometry:
    vector = kv.dim * layout.block_size * layout.element_bytes + layout.scale_bytes
    layer = kv.vectors * vector
    slots = layout.page_bytes // (layer * kv.heads)
    places = [
        (at // group.per_page, (head * slots + at % group.per_page) * layer)
        for head in part.heads
        for at in part.layers
    ]
    runs_of_heads = [
        run
        for first in range(0, len(places), max(1, len(part.layers)))
        for run in _merged((table, start, layer) for table, start in places[first : first + len(part.layers)])
    ]
    lengths = {length for _, _, length in runs_of_heads}
    if ratio > 1:
        row = vector // ratio
        runs = [(table, start + i * vector, row) for table, start in places for i in range(kv.vectors)]
    elif len(lengths) == 1 and _aligned(runs_of_heads, layout.page_bytes):
        row = lengths.pop()
        runs = runs_of_heads
    else:
        row = layer
        runs = [(table, start, layer) for table, start in places]
    return Geometry(
        width=len(group.tables),
        is_whole=ratio == 1,
        block_bytes=len(places) * layer // ratio,
        strips=tuple(_merged(runs_of_heads)),
        row_bytes=row,
        rows=tuple(start // row for _, start, _ in runs),
        tables=tuple(table for table, _, _ in runs),
        rows_per_page=layout.page_bytes // row,
    )


def _aligned(runs: Iterable[tuple[int, int, int]], page_bytes: int) -> bool:
    """Whether runs of one length can be rows: whole multiples of it from their page's beginning."""
    return all(start % length == 0 and page_bytes % length == 0 for _, start, length in runs)


def _of_state(layout: KVLayout, group: KVGroup, kv: StateKV, part: GroupPart) -> Geometry:
    cell = kv.size * 4
    cells = [layer * kv.units + unit for layer in part.layers for unit in part.heads]
    strips = tuple(_merged((at // group.per_page, at % group.per_page * cell, cell) for at in cells))
    row = gcd(layout.page_bytes, cell)
    runs = [(table, start + i) for table, start, length in strips for i in range(0, length, row)]
    return Geometry(
        width=len(group.tables),
        is_whole=True,
        block_bytes=len(cells) * cell,
        strips=strips,
        row_bytes=row,
        rows=tuple(start // row for _, start in runs),
        tables=tuple(table for table, _ in runs),
        rows_per_page=layout.page_bytes // row,
    )


def _merged(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join runs that are adjacent in one page."""
    joined: tuple[int, int, int] | None = None
    for table, start, length in runs:
        if joined is not None and joined[0] == table and joined[1] + joined[2] == start:
            joined = (table, joined[1], joined[2] + length)
            continue
        if joined is not None:
            yield joined
        joined = (table, start, length)
    if joined is not None:
        yield joined
