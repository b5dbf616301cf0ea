"""A counter and a histogram that are cheap enough to be updated for every token.

prometheus_client's metrics are for any thread: each takes a lock for every number that it changes, and a
histogram compares with one bound after the other. The metrics here belong to one thread; other threads may
read them, and may then find an observation in a bucket that is not in the sum yet.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """The value of a ``TallyCounter`` for one model."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class TallyCounter(Collector):
    """A counter with the label ``model``."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._counts: dict[str, Count] = {}
        registry.register(self)

    def labels(self, model: str) -> Count:
        """Return the count of ``model``, which is exported from now on, be it 0."""
        return self._counts.setdefault(model, Count())

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Yield the counter's name, for a registry that must know it before there is a model."""
        yield CounterMetricFamily(self._name, self._text, labels=("model",))

    def collect(self) -> Iterable[CounterMetricFamily]:
        for family in self.describe():
            for model, count in list(self._counts.items()):
                family.add_metric((model,), count.value)
            yield family


class TallyCounts:
    """The observations of a ``TallyHistogram`` for one model. ``counts`` are per bucket, not cumulative."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class TallyHistogram(Collector):
    """A histogram with the label ``model``. A value that is equal to a bucket's upper bound is in that
    bucket."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        # Bounds are written as prometheus_client writes them, so that no series changes its name.
        self._names: list[str] = [floatToGoString(bound) for bound in (*bounds, math.inf)]  # type: ignore[no-untyped-call]
        self._spreads: dict[str, TallyCounts] = {}
        registry.register(self)

    def labels(self, model: str) -> TallyCounts:
        """Return the observations of ``model``, which are exported from now on, be they none."""
        return self._spreads.setdefault(model, TallyCounts(self._bounds))

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Yield the histogram's name, for a registry that must know it before there is a model."""
        yield HistogramMetricFamily(self._name, self._text, labels=("model",))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        for family in self.describe():
            for model, spread in list(self._spreads.items()):
                buckets = list(zip(self._names, accumulate(spread.counts), strict=True))
                family.add_metric((model,), buckets, spread.sum)
            yield family
