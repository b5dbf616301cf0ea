"""Names of wire blocks: which group, page and part of a page. Pure.

A *wire block* is the unit of a link: a block of one KV group, of the smaller of both sides' block sizes. Each
side names it by where it lies: ``group << 40 | (page * blocks_per_page + index)``, where ``index`` counts the
wire blocks within a page. A block of a group with several tables lies in several pages, so it has as many
names, in a row. The block of a state, which is never divided, has index 0 in each of its pages. Of a model
with one group that keeps K and V, a name is the number of the block in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GROUP_SHIFT = 40
PLACE_MASK = (1 << GROUP_SHIFT) - 1
MAX_GROUPS = 64
"""Most groups of a model: far more than any has, and a bound on what a peer may speak of."""


def names_of(group: int, pages: Sequence[int], tables: int, blocks_per_page: int) -> tuple[int, ...]:
    """The names of the wire blocks in these pages, which are those of adjacent blocks of a sequence, one of
    each table for each block."""
    base = group << GROUP_SHIFT
    if tables == 1:
        if blocks_per_page == 1:
            return tuple(pages) if not base else tuple([base | page for page in pages])
        return tuple([base | (page * blocks_per_page + i) for page in pages for i in range(blocks_per_page)])
    return tuple(
        [
            base | (page * blocks_per_page + i)
            for block in range(0, len(pages), tables)
            for i in range(blocks_per_page)
            for page in pages[block : block + tables]
        ]
    )


def state_names(group: int, pages: Sequence[int], blocks_per_page: int) -> tuple[int, ...]:
    """The names of the one block of a state group."""
    base = group << GROUP_SHIFT
    return tuple([base | (page * blocks_per_page) for page in pages])


def group_of(name: int) -> int:
    return name >> GROUP_SHIFT


def place_of(name: int) -> int:
    """The name without its group: the number of the wire block in a pool whose pages have so many each."""
    return name & PLACE_MASK


def page_of(name: int, blocks_per_page: int) -> int:
    return (name & PLACE_MASK) // blocks_per_page


def pages_of(names: Iterable[int], blocks_per_page: int) -> tuple[int, ...]:
    """The pages that these wire blocks lie in, each once, in order."""
    return tuple(dict.fromkeys([(name & PLACE_MASK) // blocks_per_page for name in names]))
