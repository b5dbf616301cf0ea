"""How far a prefix cache lets a model go on, whatever its layers keep. The engine and the router both ask.

A cache has entries by group and block. A hit of n blocks is one with which every group of the model can go on
at token ``n * block_size``; n = 0 always is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full", "window", "latent", "state"]


@dataclass(frozen=True, slots=True)
class GroupNeeds:
    """What a group of layers needs of a prefix, to go on behind it."""

    kind: GroupKind
    window: int = 0
    """Kind ``window`` only: the tokens that a query sees, its own included."""
    chunked: bool = False
    """Whether the window is chunked: a query sees its own run of ``window`` tokens up to itself, and runs
    begin at the multiples of ``window``."""

    def __post_init__(self) -> None:
        if self.kind == "window":
            if self.window < 1:
                raise ValueError(f"a window must be at least 1, not {self.window}")
        elif self.window or self.chunked:
            given = f"window {self.window}, chunked {self.chunked}"
            raise ValueError(f"a group of kind {self.kind} has no window, but was given {given}")

    @property
    def keeps_all(self) -> bool:
        """Whether every block of the prefix is needed."""
        return self.kind in ("full", "latent")

    def first_block(self, num_blocks: int, block_size: int) -> int:
        """Return the first block that is needed of the group behind ``num_blocks`` blocks. The blocks from it
        to before ``num_blocks`` all are; it is ``num_blocks`` if none is. It never falls as ``num_blocks``
        grows."""
        tokens = num_blocks * block_size
        if self.kind == "window":
            seen = tokens // self.window * self.window if self.chunked else tokens - self.window + 1
            return max(0, seen // block_size)
        if self.kind == "state":
            return max(0, num_blocks - 1)  # its entry is the state behind that block
        return 0


WHOLE_PREFIX = (GroupNeeds("full"),)
"""The needs of a model with one group that keeps all tokens."""


def longest_hit(
    needs: Sequence[GroupNeeds], block_size: int, num_blocks: int, has: Callable[[int, int], bool]
) -> int:
    """Return the most blocks, up to ``num_blocks``, behind which every group can go on.

    ``has(group, block)`` says whether the cache has an entry; it is asked at most once for each, and of
    groups that keep all blocks no further than the first one that any of them lacks.
    """
    whole = [group for group, need in enumerate(needs) if need.keeps_all]
    rest = [(group, need) for group, need in enumerate(needs) if not need.keeps_all]
    rest.reverse()  # a state is in one block of many, and tells soonest
    count = num_blocks
    if whole:
        count = next((b for b in range(num_blocks) if not all(has(group, b) for group in whole)), num_blocks)
    there = {group: count for group, _ in rest}
    """Group → the first of its blocks, up to ``count``, that are known to be there."""
    settled = False
    while not settled:
        settled = True
        for group, need in rest:
            first = min(there[group], count)
            while first > need.first_block(count, block_size):
                first -= 1
                if not has(group, first):
                    count = first  # a hit between the two needs this block as well
                    settled = False
                    break
            there[group] = first
    return count
