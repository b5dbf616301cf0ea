"""Mean, median and percentiles of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and percentiles of at least one value, in the unit of the values."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of ``values``; None for no values: a mean of nothing is not 0."""
        if not values:
            return None
        ordered = sorted(values)
        median, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
        mean = math.fsum(ordered) / len(ordered)
        return cls(len(ordered), mean, median, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the ``q``-th percentile (0 to 100) of values in ascending order, interpolated linearly between
    neighbours like numpy's default method."""
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
