"""Whether one request keeps to the targets, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping

from baton.telemetry.goodput import GoodputMetrics, Missed
from baton.telemetry.stages import RequestStage

ALLOWED_LATE = 0.01
"""Of the gaps between a choice's tokens. An answer of fewer than a hundred may have none that is late."""


class Goodput:
    """Follows one request. It misses what the first of its choices to miss anything missed."""

    def __init__(self, metrics: GoodputMetrics, model: str, choices: int) -> None:
        self._metrics = metrics
        self._model = model
        self._targets = metrics.targets
        self._gaps = [0] * choices
        self._late = [0] * choices
        self._late_first = [False] * choices
        self._missed: tuple[Missed, str] = ("none", "")

    def began(self, seconds: float, stages: Mapping[RequestStage, float], *, interrupted: bool) -> None:
        """A choice has its first token after so many seconds, which ``stages`` took. ``interrupted``: an
        attempt was lost meanwhile."""
        limit = self._targets.ttft
        if limit is not None and seconds > limit:
            self._miss("ttft", "resume" if interrupted else max(stages, key=lambda stage: stages[stage]))

    def gap(self, index: int, seconds: float) -> None:
        """Between two deliveries of a choice. For every token: as little as may be."""
        limit = self._targets.itl
        if limit is None:
            return
        if seconds > limit:
            self._late[index] += 1
            self._late_first[index] = self._late_first[index] or not self._gaps[index]
        self._gaps[index] += 1

    def ended(self, index: int, *, interrupted: bool) -> None:
        """A choice is whole."""
        late = self._late[index]
        if late <= ALLOWED_LATE * self._gaps[index]:
            return
        if interrupted:
            cause = "resume"
        else:  # between the first two tokens the answer goes from prefill to decode
            cause = "handoff" if late == 1 and self._late_first[index] else "decode"
        self._miss("itl", cause)

    def _miss(self, missed: Missed, cause: str) -> None:
        if self._missed[0] == "none":
            self._missed = missed, cause

    def over(self) -> None:
        """All choices are whole."""
        if self._targets:
            self._metrics.ended(self._model, *self._missed)

    def failed(self, code: str) -> None:
        """The request ended in an error of this code."""
        if self._targets:
            self._metrics.ended(self._model, "error", code)
