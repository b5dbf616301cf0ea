"""The way from the pages of a sequence to the blocks that the handoff's machines speak of, and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.kv.arriving import Arriving, ArrivingGroup, needed_blocks
from baton.handoff.blocks import Binding, GroupBlocks
from baton.transport.block_names import names_of, pages_of, state_names
from baton_kernels.kv_layout import KVGroup, TokenKV


def wanted_blocks(groups: Sequence[KVGroup], num_tokens: int, block_size: int) -> tuple[range, ...]:
    """The blocks of ``block_size`` tokens of each group that a token behind the prompt needs."""
    return tuple(needed_blocks(group, num_tokens, block_size) for group in groups)


def finished_blocks(
    groups: Sequence[KVGroup],
    tables: Sequence[Sequence[int]],
    state_pages: Sequence[int],
    num_gone: Sequence[int],
    count: int,
    blocks_per_page: int,
    *,
    whole: bool,
) -> tuple[GroupBlocks, ...]:
    """The finished blocks of a sequence at prefill. ``tables``: its page tables, of all token groups.
    ``num_gone``: for each group, the blocks of this worker's size at its beginning that were given back.
    ``count``: blocks of the link that are finished. ``whole``: the prompt is computed, so that the state is
    the one to hand on."""
    found: list[GroupBlocks] = []
    num_pages = -(-count // blocks_per_page)
    for number, group in enumerate(groups):
        width = len(group.tables)
        if not isinstance(group.kv, TokenKV):
            names = state_names(number, state_pages, blocks_per_page) if whole else ()
            found.append(GroupBlocks(names, 0, width))
            continue
        gone = num_gone[number]
        own = tables[group.tables.start : group.tables.stop]
        if width == 1:
            pages: Sequence[int] = own[0][gone:num_pages]
        else:
            pages = [table[block] for block in range(gone, num_pages) for table in own]
        first = gone * blocks_per_page
        most = max(0, count - first) * width
        found.append(GroupBlocks(names_of(number, pages, width, blocks_per_page)[:most], first, width))
    return tuple(found)


def arriving_binding(arriving: Arriving, num_tokens: int, block_size: int, blocks_per_page: int) -> Binding:
    """The blocks of a link in the pages of a sequence that arrives, and those of them that are missing.
    ``block_size``: this worker's."""
    groups: list[GroupBlocks] = []
    missing: list[tuple[range, ...]] = []
    pinned: list[int] = []
    for number, bound in enumerate(arriving.groups):
        blocks, runs = _blocks_of(number, bound, num_tokens, block_size, blocks_per_page)
        groups.append(blocks)
        missing.append(runs)
        for run in runs:
            pinned += pages_of(blocks.names_of(run.start, run.stop), blocks_per_page)
    return Binding(tuple(groups), tuple(missing), tuple(pinned), arriving.pages)


def _blocks_of(
    number: int, bound: ArrivingGroup, num_tokens: int, block_size: int, per_page: int
) -> tuple[GroupBlocks, tuple[range, ...]]:
    group, width = bound.group, len(bound.group.tables)
    if not isinstance(group.kv, TokenKV):
        blocks = GroupBlocks(state_names(number, bound.pages, per_page), 0, width)
        return blocks, bound.fresh
    needed = needed_blocks(group, num_tokens, block_size // per_page)
    before = bound.first * per_page
    names = names_of(number, bound.pages, width, per_page)
    blocks = GroupBlocks(
        names[(needed.start - before) * width : (needed.stop - before) * width], needed.start, width
    )
    runs = (
        range(max(needed.start, run.start * per_page), min(needed.stop, run.stop * per_page))
        for run in bound.fresh
    )
    return blocks, tuple(run for run in runs if run)


def with_partial_blocks(arriving: Arriving, num_tokens: int, block_size: int, per_page: int) -> Arriving:
    """Mark the groups whose first block will lack its first tokens: prefill, whose blocks are smaller, has
    given these back."""
    if per_page == 1:
        return arriving
    marked = []
    for bound in arriving.groups:
        lacks = (
            isinstance(bound.group.kv, TokenKV)
            and any(bound.first in run for run in bound.fresh)
            and needed_blocks(bound.group, num_tokens, block_size // per_page).start > bound.first * per_page
        )
        marked.append(replace(bound, partial=True) if lacks else bound)
    return Arriving(tuple(marked))
