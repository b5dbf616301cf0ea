"""How fast the ring gets through its work, as the router sees it. Pure: times are given."""

from __future__ import annotations

import math

MEMORY_S = 10.0
MEASURED_S = 3.0
"""Of waiting, before the measurement is believed."""
FIRST_OUTPUTS = 128.0
"""Tokens of an answer before any has ended."""
WEIGHT = 0.05
"""Of the newest answer in what is usual."""


class Pace:
    """Tokens a second while there is more to do than may be open, and what an answer usually has.

    Only those times count in which somebody waits: a ring that has little to do shows nothing of what it
    could.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        """From when on somebody has waited; None: nobody does."""
        self._outputs = FIRST_OUTPUTS
        self._token_s = 0.0
        self._answer_s = 0.0
        self._answer_tokens = 0.0
        """What answers usually take and have, of those that have ended."""

    def waiting(self, waits: bool, now: float) -> None:
        """Whether somebody waits, from now on."""
        self._pass(now)
        self._since = now if waits else None

    def _pass(self, now: float) -> None:
        if self._since is None or now <= self._since:
            return
        fade = math.exp(-(now - self._since) / MEMORY_S)
        self._tokens *= fade
        self._seconds = self._seconds * fade + (1 - fade) * MEMORY_S
        self._since = now

    def ended(self, tokens: int, outputs: int, answers: int, seconds: float, now: float) -> None:
        """A request has ended that took ``seconds`` for so many tokens, ``outputs`` of them its answers'."""
        if self._since is not None:
            self._pass(now)
            self._tokens += tokens
        self._outputs += WEIGHT * (outputs / answers - self._outputs)
        self._token_s = _smoothed(self._token_s, seconds / max(1, tokens))
        self._answer_s = _smoothed(self._answer_s, seconds)
        self._answer_tokens = _smoothed(self._answer_tokens, max(1, outputs / answers))

    @property
    def outputs(self) -> float:
        """Tokens that an answer usually has."""
        return self._outputs

    def per_second(self, open_requests: int) -> float | None:
        """Tokens a second; None: not known yet. In the first seconds few requests have ended that came since,
        and what those before took says more: so many at once, each so fast (Little's law)."""
        if self._seconds >= MEASURED_S and self._tokens:
            return self._tokens / self._seconds
        return open_requests / self._token_s if self._token_s and open_requests else None

    def takes_s(self, most_outputs: float) -> float:
        """How long a request usually takes, once it is let in, each of whose answers may have so many tokens;
        0.0: not known yet. Answers of one request are written at once. Its prompt is left out, as prompts are
        read much faster, and what others' took is in the time of their answers."""
        if not self._answer_tokens:
            return 0.0
        return self._answer_s * min(1.0, most_outputs / self._answer_tokens)


def _smoothed(before: float, newest: float) -> float:
    return newest if not before else before + WEIGHT * (newest - before)
