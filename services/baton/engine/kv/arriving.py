"""The pages of a sequence whose KV arrives from another worker, group by group. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from baton_kernels.kv_layout import KVGroup, TokenKV
from baton_kernels.window import ChunkedWindow, Window


def first_seen(window: Window | None, position: int) -> int:
    """The first token that a query at ``position`` sees."""
    match window:
        case None:
            return 0
        case ChunkedWindow(size=size):
            return position // size * size
        case _:
            return max(0, position - window + 1)


def needed_blocks(group: KVGroup, num_tokens: int, block_size: int) -> range:
    """The blocks of ``block_size`` tokens of which a token behind the first ``num_tokens`` sees something. A
    state group has one block: the state after all of these tokens."""
    if not isinstance(group.kv, TokenKV):
        return range(1)
    return range(first_seen(group.kv.window, num_tokens) // block_size, -(-num_tokens // block_size))


def runs_of(blocks: Iterable[int]) -> tuple[range, ...]:
    """The runs of adjacent numbers in an ascending sequence."""
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class ArrivingGroup:
    """The blocks of one group that a token behind the prompt needs. Blocks have this worker's block size and
    are counted from the sequence's first; a state is block 0."""

    group: KVGroup
    first: int
    """The first block that is needed: those before it have no pages."""
    pages: tuple[int, ...]
    """The pages of the blocks from ``first`` on, one of each of the group's tables for each block, block by
    block."""
    fresh: tuple[range, ...]
    """Runs of blocks that are to be received, ascending; the pages of the others are shared with the prefix
    cache."""
    partial: bool = False
    """Whether the first block lacks its first tokens, which nobody sees any more: it must not enter the
    prefix index."""

    @property
    def is_state(self) -> bool:
        return not isinstance(self.group.kv, TokenKV)

    def pages_of(self, blocks: range) -> tuple[int, ...]:
        """The pages of these blocks, block by block."""
        width = len(self.group.tables)
        return self.pages[(blocks.start - self.first) * width : (blocks.stop - self.first) * width]

    @property
    def fresh_pages(self) -> tuple[int, ...]:
        return tuple(page for blocks in self.fresh for page in self.pages_of(blocks))


@dataclass(frozen=True, slots=True)
class Arriving:
    """The pages bound to a sequence that arrives. One reference on each is the caller's."""

    groups: tuple[ArrivingGroup, ...]
    """Each group, in the order of ``KVLayout.groups``."""

    @property
    def pages(self) -> tuple[int, ...]:
        if len(self.groups) == 1:
            return self.groups[0].pages
        return tuple(page for group in self.groups for page in group.pages)

    @property
    def fresh_pages(self) -> tuple[int, ...]:
        return tuple(page for group in self.groups for page in group.fresh_pages)

    def tables(self) -> list[array[int]]:
        """The tables of the token groups, as a sequence has them: 0 where a block is not needed."""
        made: list[array[int]] = []
        for arriving in self.groups:
            if isinstance(arriving.group.kv, TokenKV):
                width, gone = len(arriving.group.tables), [0] * arriving.first
                made += [array("q", [*gone, *arriving.pages[table::width]]) for table in range(width)]
        return made

    def state_pages(self) -> array[int]:
        """The pages of the state; empty if no layer keeps one."""
        last = self.groups[-1]
        return array("q") if isinstance(last.group.kv, TokenKV) else array("q", last.pages)
