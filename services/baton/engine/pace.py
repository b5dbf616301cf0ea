"""How fast an engine goes: the time of a step that decodes, and the prompt tokens computed per second.

Routers place requests by these figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.process.exported import gauge

KEEP = 0.98
"""The share of earlier decode steps' weight that each step keeps: the figures follow the last 50 or so."""
KEEP_PROMPTS = 0.99
"""The share of earlier prompt steps' weight that each step keeps. Short chunks compute fewer tokens a second
than long ones: it takes many steps before the figure says more of the worker than of its last prompts."""
WARMING = 4
"""The warm-up: after n steps at most n / (n + WARMING) of their weight is kept, as the first steps, which
find nothing warm, must not make a worker look slow for long. A worker that looks slow is asked less, and
would not be corrected."""
MAX_AT_ONCE = 4.0
"""A step counts for at most this multiple of its expected time: if it took longer, the process was stopped,
or had to wait, and the next step will not."""
MIN_SPREAD = 0.25
"""A constant added to the variance of the rows: while their number hardly changes, noise must not pass for a
slope."""
MIN_SHARE = 0.1
"""The smallest share of a step's time that counts for its prompts, whatever decoding beside them was
estimated to take."""


@dataclass(frozen=True, slots=True)
class PaceStats:
    """The estimates of one moment. A step that decodes n sequences takes ``step_base_s + n * step_row_s``."""

    prefill_tokens_per_s: Annotated[
        float, gauge("baton_prefill_tokens_per_second", "How fast prompts are computed here, lately.")
    ]
    """The measured, smoothed prefill speed; 0.0 before the first prompt."""
    step_base_s: Annotated[
        float,
        gauge(
            "baton_decode_step_base_seconds",
            "What a step that only decodes takes, lately, but for its sequences; 0 before the first.",
        ),
    ]
    step_row_s: Annotated[float, gauge("baton_decode_step_row_seconds", "What each sequence adds to it.")]


class StepSpeeds:
    """Running fits over an engine's own steps. Pure: times are arguments, in seconds.

    A step that decodes n sequences takes ``base_s + n * row_s``: least squares over the steps that do nothing
    else, with less weight on earlier steps. The rest of a step's time is for its prompt tokens.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0
        self._prompt_tokens = self._prompt_seconds = 0.0
        self._decode_steps = self._prompt_steps = 0

    def step(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Records a step that decoded ``rows`` sequences and computed ``prompt_tokens`` tokens of prompts."""
        if prompt_tokens:
            decoding = self.base_s + rows * self.row_s if rows else 0.0
            if self._prompt_steps >= WARMING:
                expected = decoding + max(prompt_tokens / self.prefill_tokens_per_s, self.base_s)
                seconds = min(seconds, MAX_AT_ONCE * expected)
            keep = min(KEEP_PROMPTS, self._prompt_steps / (self._prompt_steps + WARMING))
            self._prompt_steps += 1
            self._prompt_tokens = keep * self._prompt_tokens + prompt_tokens
            self._prompt_seconds = keep * self._prompt_seconds + max(seconds - decoding, MIN_SHARE * seconds)
        elif rows:
            if self._decode_steps >= WARMING:
                seconds = min(seconds, MAX_AT_ONCE * (self.base_s + rows * self.row_s))
            keep = min(KEEP, self._decode_steps / (self._decode_steps + WARMING))
            self._decode_steps += 1
            self._weight = keep * self._weight + 1
            self._rows = keep * self._rows + rows
            self._seconds = keep * self._seconds + seconds
            self._rows_rows = keep * self._rows_rows + rows * rows
            self._rows_seconds = keep * self._rows_seconds + rows * seconds

    def stats(self) -> PaceStats:
        return PaceStats(self.prefill_tokens_per_s, self.base_s, self.row_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The smoothed prefill speed; 0.0 before the first prompt."""
        return self._prompt_tokens / self._prompt_seconds if self._prompt_seconds else 0.0

    @property
    def row_s(self) -> float:
        """The time that one more sequence adds to a step, in seconds; at least 0, and not so much that
        nothing would be left for the base."""
        if not self._weight:
            return 0.0
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_rows / self._weight - rows * rows
        together = self._rows_seconds / self._weight - rows * seconds
        return min(max(0.0, together / (spread + MIN_SPREAD)), seconds / rows)

    @property
    def base_s(self) -> float:
        """The time of a decode step without its sequences, in seconds; 0.0 before the first step that only
        decodes."""
        return (self._seconds - self._rows * self.row_s) / self._weight if self._weight else 0.0
