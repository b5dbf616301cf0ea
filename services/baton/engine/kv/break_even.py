"""Whether blocks are cheaper to copy from the host than to compute again."""

from __future__ import annotations

WEIGHT = 0.2
"""The weight of the newest measurement in a running mean."""


class BreakEven:
    """Running estimates of the time to copy a block and the time to compute a token, in seconds.

    Both are measured on the work itself: copies in either direction, and steps that compute prompts. Until
    both are known, copying is taken for the cheaper one, which measures it. Pure: times are arguments.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.copy_s: float | None = None
        """The time to copy one block, in seconds; None until measured."""
        self.compute_s: float | None = None
        """The time to compute one token, in seconds; None until measured."""

    def copied(self, blocks: int, seconds: float) -> None:
        """Records that ``blocks`` blocks were copied in one go."""
        if blocks:
            self.copy_s = _mean(self.copy_s, seconds / blocks)

    def computed(self, tokens: int, seconds: float) -> None:
        """Records that a step computed ``tokens`` tokens of prompts."""
        if tokens:
            self.compute_s = _mean(self.compute_s, seconds / tokens)

    def copying_pays(self, blocks: int) -> bool:
        """Whether to copy ``blocks`` blocks rather than to compute their tokens."""
        if self.copy_s is None or self.compute_s is None:
            return True
        return blocks * self.copy_s < blocks * self._block_size * self.compute_s


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)
