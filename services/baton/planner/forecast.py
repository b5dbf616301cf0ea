"""Forecasts of a load, by level and trend, and their latest errors."""

from __future__ import annotations

import math
from collections import deque

LEVEL_S = 90.0
"""The time after which a change of the level counts for two thirds, in seconds."""
TREND_S = 3600.0
"""The time after which a change of the trend counts for two thirds, in seconds: as slow as a day's load
turns. The slope of a few minutes is mostly noise, which weighs the more the longer a pod takes to start."""
ERROR_S = 12 * 3600.0
"""The time over which errors are averaged, in seconds. Bursts are rare: an hour has one or none, and says
little of the next."""
STEEPEST = 0.5
"""The share of the level by which a forecast may be above or below it: no load doubles because it rose for a
minute."""
FIRST_ERROR = 0.1
"""The relative error assumed before any forecast's time has come."""
FIRST_S = 1800.0
"""The time for which an assumed value counts as if it had been seen, in seconds."""


class _LongMean:
    """The mean over everything that was seen, or roughly the last ``ERROR_S`` seconds of it."""

    def __init__(self, assumed: float) -> None:
        self.value = assumed
        self._seen_s = FIRST_S

    def see(self, value: float, passed: float) -> None:
        """Count ``value`` for the ``passed`` seconds."""
        self._seen_s = min(ERROR_S, self._seen_s + passed)
        self.value += min(1.0, passed / self._seen_s) * (value - self.value)


class Forecast:
    """The forecast of one load. Pure: callers pass the time, in seconds."""

    def __init__(self, horizon_s: float, pause_s: float = math.inf) -> None:
        """``horizon_s``: how far ahead to forecast. ``pause_s``: the load between two values further apart
        than this is unknown."""
        self._horizon_s = horizon_s
        self._pause_s = pause_s
        self._at_s: float | None = None
        self._level = self._slope = 0.0
        self._variance = _LongMean(FIRST_ERROR**2)
        self._due: deque[tuple[float, float]] = deque()

    def see(self, at_s: float, value: float, jump: float = math.inf) -> None:
        """Take ``value`` as the load until now. Times never go back. A value further than ``jump`` from the
        expected one is no noise: the level follows at once, and the slope is reset."""
        if self._at_s is None:
            self._at_s, self._level = at_s, value
            return
        passed = at_s - self._at_s
        if passed <= 0:
            return
        self._at_s = at_s
        follow, turn = 1 - math.exp(-passed / LEVEL_S), 1 - math.exp(-passed / TREND_S)
        before = self._level
        expected = before + self._slope * passed
        if abs(value - expected) > jump:
            self._level, self._slope = value, 0.0
        else:
            self._level = max(0.0, expected + follow * (value - expected))
            self._slope += turn * ((self._level - before) / passed - self._slope)
        self._judge(at_s, passed)
        self._due.append((at_s + self._horizon_s, self.then))

    def _judge(self, at_s: float, passed: float) -> None:
        """Compare the load with what was forecast for now. Having expected too much misses no target and does
        not count; neither do forecasts for a pause, of which the load after it says nothing."""
        while self._due and self._due[0][0] <= at_s:
            _, told = self._due.popleft()
            if passed > self._pause_s:
                continue
            wrong = max(0.0, self._level / told - 1) if told else 0.0
            self._variance.see(min(wrong, 1.0) ** 2, passed)

    @property
    def now(self) -> float:
        return self._level

    @property
    def then(self) -> float:
        """The load expected after the horizon."""
        most = STEEPEST * self._level
        return max(0.0, self._level + max(-most, min(most, self._slope * self._horizon_s)))

    @property
    def error(self) -> float:
        """The standard deviation by which loads exceeded their forecasts, relative."""
        return math.sqrt(self._variance.value)


class Burstiness:
    """How much more arrivals vary than independent ones would: the variance of their number in a window over
    its mean. About 1 for a Poisson process."""

    def __init__(self) -> None:
        self._ratio = _LongMean(1.0)
        self._at_s: float | None = None

    def see(self, at_s: float, per_s: float, level: float, window_s: float) -> None:
        """Take ``per_s`` as the rate of arrivals in the last ``window_s``, where ``level`` was expected."""
        if self._at_s is None or level <= 0:
            self._at_s = at_s
            return
        passed, self._at_s = at_s - self._at_s, at_s
        ratio = (per_s - level) ** 2 * window_s / level
        self._ratio.see(min(ratio, MAX_BURSTY * 4), max(0.0, passed))

    @property
    def ratio(self) -> float:
        return min(max(1.0, self._ratio.value), MAX_BURSTY)


MAX_BURSTY = 16.0
