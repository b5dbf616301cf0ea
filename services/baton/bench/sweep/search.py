"""The search for the highest request rate at which enough requests meet their goals."""

from __future__ import annotations

import math

_UP = 1.6
_DOWN = 0.5


class RateSearch:
    """Bisection on the logarithm of the rate, from ``start`` requests/s. The search goes up or down until the
    highest rate that meets the goals and the lowest that does not are known, and then halves the interval."""

    def __init__(self, start: float) -> None:
        self._next = start
        self._met = 0.0
        self._missed = math.inf

    @property
    def rate(self) -> float:
        """The rate to try next, in requests/s."""
        return self._next

    def tell(self, rate: float, met: bool) -> None:
        """Take whether the goals were met at ``rate``, which may be a little off the rate asked for."""
        if met:
            self._met = max(self._met, rate)
        else:
            self._missed = min(self._missed, rate)
        if self._met == 0:
            self._next = self._missed * _DOWN
        elif self._missed <= self._met:  # a noisy machine: the met rate is believed
            self._missed, self._next = math.inf, self._met * _UP
        elif math.isinf(self._missed):
            self._next = self._met * _UP
        else:
            self._next = math.sqrt(self._met * self._missed)
