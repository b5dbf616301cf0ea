"""Whether blocks are cheaper to copy from the host than to compute again."""

from __future__ import annotations

WEIGHT = 0.2
"""Of the newest measurement in a running mean."""


class BreakEven:
    """Running estimates of what a block takes to copy and what a token takes to compute, in seconds.

    Both are measured on the work itself: copies in either direction, and steps that compute prompts. Until
    both are known, copying is taken for the cheaper one, which measures it. Pure: times are told.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.copy_s: float | None = None
        """Of one block."""
        self.compute_s: float | None = None
        """Of one token."""

    def copied(self, blocks: int, seconds: float) -> None:
        """So many blocks were copied in one go."""
        if blocks:
            self.copy_s = _mean(self.copy_s, seconds / blocks)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts."""
        if tokens:
            self.compute_s = _mean(self.compute_s, seconds / tokens)

    def copying_pays(self, blocks: int) -> bool:
        """Whether to copy so many blocks rather than to compute their tokens."""
        if self.copy_s is None or self.compute_s is None:
            return True
        return blocks * self.copy_s < blocks * self._block_size * self.compute_s


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)
