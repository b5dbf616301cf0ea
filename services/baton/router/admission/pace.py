"""The ring's throughput as the router sees it. Pure: times are arguments."""

from __future__ import annotations

import math

MEMORY_S = 10.0
MEASURED_S = 3.0
"""The time that requests must have waited before the measurement is believed, in seconds."""
FIRST_OUTPUTS = 128.0
"""The estimated tokens of an answer before any answer has ended."""
WEIGHT = 0.05
"""The weight of the newest answer in the averages."""


class ServiceRate:
    """The tokens per second while more is to do than may be open, and the usual length of an answer.

    Only time in which requests wait counts: a ring that has little to do does not show what it could do.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        """The time up to which waiting is accounted for; None while no request waits."""
        self._outputs = FIRST_OUTPUTS
        self._token_s = 0.0
        self._answer_s = 0.0
        self._answer_tokens = 0.0
        """Averages over the answers that have ended: seconds per token, seconds per answer, tokens per
        answer."""

    def waiting(self, waits: bool, now: float) -> None:
        """Set whether any request waits from ``now`` on."""
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
        """Note the end of a request that took ``seconds`` for ``tokens`` tokens, of which ``outputs`` were
        generated."""
        if self._since is not None:
            self._pass(now)
            self._tokens += tokens
        self._outputs += WEIGHT * (outputs / answers - self._outputs)
        self._token_s = _smoothed(self._token_s, seconds / max(1, tokens))
        self._answer_s = _smoothed(self._answer_s, seconds)
        self._answer_tokens = _smoothed(self._answer_tokens, max(1, outputs / answers))

    @property
    def outputs(self) -> float:
        """The usual tokens of an answer."""
        return self._outputs

    def per_second(self, open_requests: int) -> float | None:
        """Return the tokens per second; None while unknown.

        In the first seconds few requests have ended that came since the measurement began, and the times of
        earlier requests say more: so many requests at once, each so fast (Little's law).
        """
        if self._seconds >= MEASURED_S and self._tokens:
            return self._tokens / self._seconds
        return open_requests / self._token_s if self._token_s and open_requests else None

    def takes_s(self, max_outputs: float) -> float:
        """Return how long a request usually takes once it is let in, in seconds, if each of its answers may
        have ``max_outputs`` tokens; 0.0 while unknown.

        All answers of a request are written at once. The time for its own prompt is left out, as prompts are
        read much faster than answers are written; the time for other requests' prompts is in the time of
        their answers.
        """
        if not self._answer_tokens:
            return 0.0
        return self._answer_s * min(1.0, max_outputs / self._answer_tokens)


def _smoothed(before: float, newest: float) -> float:
    return newest if not before else before + WEIGHT * (newest - before)
