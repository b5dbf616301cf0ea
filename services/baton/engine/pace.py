"""How fast an engine goes: what a step takes that decodes, and how many prompt tokens a second it computes.

Routers place requests by these figures.
"""

from __future__ import annotations

KEEP = 0.98
"""Of what earlier steps weigh, after each step: the figures follow the last 50 or so."""
KEEP_PROMPTS = 0.99
"""Likewise for steps with prompts. Short chunks compute fewer tokens a second than long ones: it takes many
before the figure says more of the worker than of its last prompts."""
WARMING = 4
"""After n steps no more than n / (n + WARMING) of them is kept: the first ones, which find nothing warm, must
not make a worker look slow for long. Who looks slow is asked less, and would not be put right."""
MOST_AT_ONCE = 4.0
"""A step counts for at most so many times what it was expected to take: if it took longer, the process was
stopped, or had to wait, and the next one will not."""
LEAST_SPREAD = 0.25
"""Added to the variance of the rows: while their number hardly changes, noise must not pass for a slope."""
LEAST_SHARE = 0.1
"""Of a step's time that is its prompts', whatever decoding beside them was estimated to take."""


class Pace:
    """Running fits over an engine's own steps. Pure: times are told, in seconds.

    A step that decodes n sequences takes ``base_s + n * row_s``: least squares over the steps that do nothing
    else, earlier ones weighing less. What a step takes beyond that is for its prompt tokens.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0
        self._prompt_tokens = self._prompt_seconds = 0.0
        self._decode_steps = self._prompt_steps = 0

    def step(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A step decoded ``rows`` sequences and computed so many tokens of prompts."""
        if prompt_tokens:
            decoding = self.base_s + rows * self.row_s if rows else 0.0
            if self._prompt_steps >= WARMING:
                expected = decoding + max(prompt_tokens / self.prefill_tokens_per_s, self.base_s)
                seconds = min(seconds, MOST_AT_ONCE * expected)
            keep = min(KEEP_PROMPTS, self._prompt_steps / (self._prompt_steps + WARMING))
            self._prompt_steps += 1
            self._prompt_tokens = keep * self._prompt_tokens + prompt_tokens
            self._prompt_seconds = keep * self._prompt_seconds + max(
                seconds - decoding, LEAST_SHARE * seconds
            )
        elif rows:
            if self._decode_steps >= WARMING:
                seconds = min(seconds, MOST_AT_ONCE * (self.base_s + rows * self.row_s))
            keep = min(KEEP, self._decode_steps / (self._decode_steps + WARMING))
            self._decode_steps += 1
            self._weight = keep * self._weight + 1
            self._rows = keep * self._rows + rows
            self._seconds = keep * self._seconds + seconds
            self._rows_rows = keep * self._rows_rows + rows * rows
            self._rows_seconds = keep * self._rows_seconds + rows * seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        """0.0 before the first prompt."""
        return self._prompt_tokens / self._prompt_seconds if self._prompt_seconds else 0.0

    @property
    def row_s(self) -> float:
        """What one more sequence adds to a step; never less than nothing, nor so much that nothing would be
        left for the base."""
        if not self._weight:
            return 0.0
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_rows / self._weight - rows * rows
        together = self._rows_seconds / self._weight - rows * seconds
        return min(max(0.0, together / (spread + LEAST_SPREAD)), seconds / rows)

    @property
    def base_s(self) -> float:
        """0.0 before the first step that only decodes."""
        return (self._seconds - self._rows * self.row_s) / self._weight if self._weight else 0.0
