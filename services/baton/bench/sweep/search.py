"""Looks for the highest request rate at which enough requests meet their goals."""

from __future__ import annotations

import math

_UP = 1.6
_DOWN = 0.5


class RateSearch:
    """Bisection on the logarithm of the rate, from ``start`` requests/s. It goes up or down until the highest
    rate that is met and the lowest that is not are known, and halves what is between."""

    def __init__(self, start: float) -> None:
        self._next = start
        self._met = 0.0
        self._missed = math.inf

    @property
    def rate(self) -> float:
        """What to try next."""
        return self._next

    def tell(self, rate: float, met: bool) -> None:
        """Whether the goals were met at ``rate``, which may be a little off what was to be tried."""
        if met:
            self._met = max(self._met, rate)
        else:
            self._missed = min(self._missed, rate)
        if self._met == 0:
            self._next = self._missed * _DOWN
        elif self._missed <= self._met:  # a noisy machine: what was met is believed
            self._missed, self._next = math.inf, self._met * _UP
        elif math.isinf(self._missed):
            self._next = self._met * _UP
        else:
            self._next = math.sqrt(self._met * self._missed)
