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
        each = seconds / max(1, tokens)
        self._token_s = each if not self._token_s else self._token_s + WEIGHT * (each - self._token_s)

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

    def takes_s(self, tokens: int) -> float:
        """How long a request of so many tokens takes, once it is let in; 0.0: not known yet."""
        return tokens * self._token_s
