"""The workers that hold all that a windowed group needs of a prefix, as the prefix grows block by block."""

from __future__ import annotations

from baton.core.prefix_hit import GroupNeeds

EVERYBODY = -1
"""All workers there could be, as bits."""


class WindowTail:
    """The workers that hold each of a prefix's last blocks, as many of them as a window reaches into.

    A queue of two stacks: the sets of holders at its front are kept as those who hold a block and all behind
    it in that stack, so that one that leaves takes one step in the mean, and none is looked at again.
    """

    def __init__(self, need: GroupNeeds, block_size: int) -> None:
        self._need = need
        self._block_size = block_size
        self._front: list[int] = []
        """The holders of a block and of those after it in here; the oldest block is last."""
        self._back: list[int] = []
        """The holders of the blocks after those in front, in order."""
        self._in_back = EVERYBODY
        """The holders of all blocks in back."""
        self._num_blocks = 0
        self._dropped = 0

    def holders_behind(self, holders: int) -> int:
        """Add the next block, which ``holders`` hold. Return those who hold all that is needed behind it."""
        self._num_blocks += 1
        self._back.append(holders)
        self._in_back &= holders
        first = self._need.first_block(self._num_blocks, self._block_size)
        while self._dropped < first:
            self._drop()
        return self._front[-1] & self._in_back if self._front else self._in_back

    def _drop(self) -> None:
        """Take the oldest block out."""
        if not self._front:
            common = EVERYBODY
            for holders in reversed(self._back):
                common &= holders
                self._front.append(common)
            self._back.clear()
            self._in_back = EVERYBODY
        self._front.pop()
        self._dropped += 1
