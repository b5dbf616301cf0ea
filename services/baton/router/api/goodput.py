"""Whether one request meets its targets, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping

from baton.telemetry.goodput import GoodputMetrics, Missed
from baton.telemetry.stages import RequestStage

ALLOWED_LATE = 0.01
"""The part of the gaps between a choice's tokens that may be late. An answer of fewer than a hundred tokens
may have no late gap."""


class Goodput:
    """Follows one request. The first target that any of its choices misses counts for the whole request."""

    def __init__(self, metrics: GoodputMetrics, model: str, choices: int) -> None:
        self._metrics = metrics
        self._model = model
        self._targets = metrics.targets
        self._gaps = [0] * choices
        self._late = [0] * choices
        self._late_first = [False] * choices
        self._missed: tuple[Missed, str] = ("none", "")

    def began(self, seconds: float, stages: Mapping[RequestStage, float], *, interrupted: bool) -> None:
        """Note a choice's first token, ``seconds`` after arrival, of which ``stages`` are the parts.
        ``interrupted``: whether an attempt was lost meanwhile."""
        limit = self._targets.ttft
        if limit is not None and seconds > limit:
            self._miss("ttft", "resume" if interrupted else max(stages, key=lambda stage: stages[stage]))

    def gap(self, index: int, seconds: float) -> None:
        """Note the time between two deliveries of a choice. Called per token: must be cheap."""
        limit = self._targets.itl
        if limit is None:
            return
        if seconds > limit:
            self._late[index] += 1
            self._late_first[index] = self._late_first[index] or not self._gaps[index]
        self._gaps[index] += 1

    def ended(self, index: int, *, interrupted: bool) -> None:
        """Note that a choice is complete."""
        late = self._late[index]
        if late <= ALLOWED_LATE * self._gaps[index]:
            return
        if interrupted:
            cause = "resume"
        else:  # the answer goes from prefill to decode between its first two tokens
            cause = "handoff" if late == 1 and self._late_first[index] else "decode"
        self._miss("itl", cause)

    def _miss(self, missed: Missed, cause: str) -> None:
        if self._missed[0] == "none":
            self._missed = missed, cause

    def over(self) -> None:
        """Count a request whose choices are all complete."""
        if self._targets:
            self._metrics.ended(self._model, *self._missed)

    def failed(self, code: str) -> None:
        """Count a request that ended in an error of this code."""
        if self._targets:
            self._metrics.ended(self._model, "error", code)
