"""Metrics of a router's event loop, which all requests share: how late its timers come."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.telemetry.tally import TallyCounts

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SLOT_S = 10.0
SLOTS = 6


class TurnMetrics(Collector):
    """Delays of the event loop's timers. Written by the event loop's thread; other threads may read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._spread = TallyCounts(BOUNDS)
        self._longest, self._own = _Longest(), _Longest()
        self._names: list[str] = [floatToGoString(bound) for bound in (*BOUNDS, math.inf)]  # type: ignore[no-untyped-call]
        registry.register(self)

    def observe(self, seconds: float, now: float, own_s: float | None = None) -> None:
        """Observe a timer that came ``seconds`` late, at ``now``. ``own_s``: the delay without the time that
        the thread waited for a processor; None if it did not wait."""
        self._spread.observe(seconds)
        self._longest.saw(seconds, now)
        self._own.saw(seconds if own_s is None else own_s, now)

    def longest(self, now: float) -> float:
        """Return the longest delay of the last minute, in seconds."""
        return self._longest.by(now)

    def longest_own(self, now: float) -> float:
        """Return the longest delay of the last minute without waits for a processor, in seconds."""
        return self._own.by(now)

    def collect(self) -> Iterable[Metric]:
        lag = HistogramMetricFamily(
            "baton_router_event_loop_lag_seconds",
            "How late timers of the event loop come, by one that is due each 40 ms, and each 10 ms after one "
            "that came late.",
        )
        buckets = list(zip(self._names, accumulate(self._spread.counts), strict=True))
        lag.add_metric((), buckets, self._spread.sum)
        yield lag
        longest = GaugeMetricFamily(
            "baton_router_event_loop_longest_turn_seconds",
            "The longest turn of the event loop in the last minute.",
        )
        longest.add_metric((), self.longest(time.monotonic()))
        yield longest
        own = GaugeMetricFamily(
            "baton_router_event_loop_longest_own_turn_seconds",
            "The longest turn of the event loop in the last minute, without what it waited for a processor.",
        )
        own.add_metric((), self.longest_own(time.monotonic()))
        yield own


class _Longest:
    """The longest delay of the last minute. Written by one thread; other threads may read."""

    def __init__(self) -> None:
        self._slot = 0
        self._longest = 0.0
        """The longest delay in the current slot, in seconds."""
        self._past: deque[tuple[int, float]] = deque(maxlen=SLOTS)
        """The longest delay of each past slot, by the slot's number."""

    def saw(self, seconds: float, now: float) -> None:
        slot = int(now / SLOT_S)
        if slot != self._slot:
            self._past.append((self._slot, self._longest))
            self._slot, self._longest = slot, seconds
        elif seconds > self._longest:
            self._longest = seconds

    def by(self, now: float) -> float:
        oldest = int(now / SLOT_S) - SLOTS
        slots = [*list(self._past), (self._slot, self._longest)]
        return max((longest for slot, longest in slots if slot >= oldest), default=0.0)
