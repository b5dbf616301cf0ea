"""The blocks of a request on one side of a link, group by group. Pure.

Blocks have the link's size here and are counted from the request's first. A state group has one block, number
0: the state after all tokens of the prompt. Names are those of ``baton.transport.block_names``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Adjacent blocks of one group."""

    names: tuple[int, ...]
    """The names of the blocks from ``first`` on: ``tables`` of each, in a row."""
    first: int = 0
    tables: int = 1

    @property
    def end(self) -> int:
        """The number behind the last block."""
        return self.first + len(self.names) // self.tables

    def names_of(self, first: int, end: int) -> tuple[int, ...]:
        """The names of the blocks from ``first`` to ``end`` - 1. Raises ValueError unless all are here."""
        start, tables = self.first, self.tables
        if not start <= first <= end <= self.end:
            raise ValueError(f"blocks {first} to {end - 1}: of {start} to {self.end - 1} are allowed")
        return self.names[(first - start) * tables : (end - start) * tables]


@dataclass(frozen=True, slots=True)
class Binding:
    """The pages bound to a handoff at decode."""

    groups: tuple[GroupBlocks, ...]
    """The blocks of each group that a token behind the prompt needs."""
    missing: tuple[tuple[range, ...], ...]
    """Runs of blocks of each group that decode's cache lacks, ascending: they are to be received."""
    pinned: tuple[int, ...]
    """The pages of the missing blocks, pinned for the transport."""
    pages: tuple[int, ...]
    """All pages that the handoff has a reference on."""
