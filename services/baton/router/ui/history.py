"""The last minutes of a router, as its page shows them: a point every two seconds, made from the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from prometheus_client import Counter, Gauge, Histogram

from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.ring import RingSource

log = logging.getLogger(__name__)

EVERY_S = 2.0
MOST_POINTS = 150
"""Five minutes."""
WINDOW = 5
"""Points before a point whose answers its quantiles and rates are of: ten seconds."""

Buckets = tuple[tuple[float, float], ...]
"""(upper bound, observations up to it), ascending, the last bound being infinite."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What has been counted since the router started, at one moment."""

    at: float
    prompt_tokens: float
    generated_tokens: float
    answers: float
    """Those that have ended, however."""
    ttft: Buckets
    itl: Buckets


@dataclass(frozen=True, slots=True)
class Point:
    """Rates per second, and quantiles in milliseconds: None where nothing was observed."""

    at: float
    prompt_rate: float
    token_rate: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    in_flight: float
    waiting: float


class History:
    """Event loop's thread only."""

    def __init__(
        self, metrics: RouterMetrics, rings: Sequence[RingSource], waiting: Callable[[], int]
    ) -> None:
        """``waiting``: requests in front of the rings."""
        self._metrics = metrics
        self._rings = rings
        self._waiting = waiting
        self._totals: deque[Totals] = deque([self._read(time.monotonic())], maxlen=WINDOW + 1)
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)

    async def run(self) -> NoReturn:
        """Add points, for as long as the router lives."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.tick(time.monotonic())
            except Exception:
                log.exception("a point of the live page could not be made")

    def tick(self, now: float) -> None:
        totals = self._read(now)
        before = self._totals[0]
        self._totals.append(totals)
        seconds = max(totals.at - before.at, 1e-9)
        self._points.append(
            Point(
                at=now,
                prompt_rate=(totals.prompt_tokens - before.prompt_tokens) / seconds,
                token_rate=(totals.generated_tokens - before.generated_tokens) / seconds,
                ttft_p50=_ms(quantile(0.5, before.ttft, totals.ttft)),
                ttft_p99=_ms(quantile(0.99, before.ttft, totals.ttft)),
                itl_p50=_ms(quantile(0.5, before.itl, totals.itl)),
                itl_p99=_ms(quantile(0.99, before.itl, totals.itl)),
                in_flight=value_of(self._metrics.in_flight),
                waiting=self._waiting(),
            )
        )

    def document(self) -> dict[str, object]:
        """All that the page shows, as it is now."""
        now = time.monotonic()
        totals = self._read(now)
        return {
            "in_flight": value_of(self._metrics.in_flight),
            "waiting": self._waiting(),
            "prompt_tokens": totals.prompt_tokens,
            "generated_tokens": totals.generated_tokens,
            "answers": totals.answers,
            "workers": self._workers(),
            "points": [{**asdict(point), "at": round(point.at - now, 1)} for point in self._points],
            "every_s": EVERY_S,
            "most_points": MOST_POINTS,
        }

    def _workers(self) -> list[dict[str, object]]:
        found = [(ring.model, view) for ring in self._rings for view in ring.views()]
        found.sort(key=lambda each: (each[0], each[1].role, each[1].address))
        return [{**asdict(view), "model": model} for model, view in found]

    def _read(self, now: float) -> Totals:
        metrics = self._metrics
        return Totals(
            now,
            value_of(metrics.prompt_tokens),
            value_of(metrics.generated_tokens),
            value_of(metrics.choices),
            buckets_of(metrics.time_to_first_token),
            buckets_of(metrics.inter_token_latency),
        )


def value_of(metric: Counter | Gauge) -> float:
    """Over all labels."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))


def buckets_of(histogram: Histogram) -> Buckets:
    """Over all labels."""
    found: dict[float, float] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0.0) + sample.value
    return tuple(sorted(found.items()))


def quantile(share: float, before: Buckets, after: Buckets) -> float | None:
    """Of what was observed in between, as Prometheus estimates it: evenly spread within a bucket, and the
    highest finite bound for what lies beyond. None: nothing was observed."""
    then = dict(before)  # of a histogram with labels, empty before its first observation
    counts = [(bound, count - then.get(bound, 0.0)) for bound, count in after]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if bound == float("inf"):
                return lower
            inside = count - below
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        lower, below = bound, count
    return lower


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
