"""The last minutes of a router, as its page shows them: a point every two seconds, made from the metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import msgspec
from prometheus_client.registry import Collector

from baton.router.processes.siblings import Siblings
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.ring import RingSource

EVERY_S = 2.0
MOST_POINTS = 150
"""Five minutes."""
WINDOW = 5
"""Points before a point whose answers its quantiles and rates are of: ten seconds."""

TOTALS = "totals"
"""What the processes of a router ask each other for."""

Buckets = tuple[tuple[float, float], ...]
"""(upper bound, observations up to it), ascending, the last bound being infinite."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What has been counted since the router started, and what there is, at one moment."""

    in_flight: float
    waiting: float
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
    """Of all processes of a router together. Event loop's thread only."""

    def __init__(
        self,
        metrics: RouterMetrics,
        rings: Sequence[RingSource],
        waiting: Callable[[], int],
        siblings: Siblings | None = None,
    ) -> None:
        """``waiting``: requests in front of the rings."""
        self._metrics = metrics
        self._rings = rings
        self._waiting = waiting
        self._siblings = siblings or Siblings()
        self._siblings.on(TOTALS, self._tell_totals)
        self._others: dict[int, Totals] = {}
        self._seen: deque[tuple[float, Totals]] = deque([(time.monotonic(), self._mine())], maxlen=WINDOW + 1)
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)

    async def run(self) -> NoReturn:
        """Add points, for as long as the router lives."""
        while True:
            await asyncio.sleep(EVERY_S)
            totals = await self.totals()
            self.tick(time.monotonic(), totals)

    def tick(self, now: float, totals: Totals) -> None:
        then, before = self._seen[0]
        self._seen.append((now, totals))
        seconds = max(now - then, 1e-9)
        self._points.append(
            Point(
                at=now,
                # One that took the place of a process that died begins at 0.
                prompt_rate=max(0.0, totals.prompt_tokens - before.prompt_tokens) / seconds,
                token_rate=max(0.0, totals.generated_tokens - before.generated_tokens) / seconds,
                ttft_p50=_ms(quantile(0.5, before.ttft, totals.ttft)),
                ttft_p99=_ms(quantile(0.99, before.ttft, totals.ttft)),
                itl_p50=_ms(quantile(0.5, before.itl, totals.itl)),
                itl_p99=_ms(quantile(0.99, before.itl, totals.itl)),
                in_flight=totals.in_flight,
                waiting=totals.waiting,
            )
        )

    async def document(self) -> dict[str, object]:
        """All that the page shows, as it is now."""
        totals = await self.totals()
        now = time.monotonic()
        return {
            "in_flight": totals.in_flight,
            "waiting": totals.waiting,
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

    async def totals(self) -> Totals:
        """Of all processes that answer."""
        for index, told in (await self._siblings.ask(TOTALS)).items():
            self._others[index] = msgspec.msgpack.decode(told, type=Totals)
        return _sum([self._mine(), *self._others.values()])  # of one that is silent, what it said last

    async def _tell_totals(self, _: bytes) -> bytes:
        return msgspec.msgpack.encode(self._mine())

    def _mine(self) -> Totals:
        metrics = self._metrics
        return Totals(
            value_of(metrics.in_flight),
            self._waiting(),
            value_of(metrics.prompt_tokens),
            value_of(metrics.generated_tokens),
            value_of(metrics.choices),
            buckets_of(metrics.time_to_first_token),
            buckets_of(metrics.inter_token_latency),
        )


def _sum(totals: Sequence[Totals]) -> Totals:
    return Totals(
        in_flight=sum(each.in_flight for each in totals),
        waiting=sum(each.waiting for each in totals),
        prompt_tokens=sum(each.prompt_tokens for each in totals),
        generated_tokens=sum(each.generated_tokens for each in totals),
        answers=sum(each.answers for each in totals),
        ttft=_added(each.ttft for each in totals),
        itl=_added(each.itl for each in totals),
    )


def _added(several: Iterable[Iterable[tuple[float, float]]]) -> Buckets:
    found: dict[float, float] = {}
    for buckets in several:
        for bound, count in buckets:
            found[bound] = found.get(bound, 0.0) + count
    return tuple(sorted(found.items()))


def value_of(metric: Collector) -> float:
    """Over all labels."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))


def buckets_of(histogram: Collector) -> Buckets:
    """Over all labels."""
    samples = (sample for family in histogram.collect() for sample in family.samples)
    return _added(
        [(float(sample.labels["le"]), sample.value)] for sample in samples if sample.name.endswith("_bucket")
    )


def quantile(share: float, before: Buckets, after: Buckets) -> float | None:
    """Of what was observed in between, as Prometheus estimates it: evenly spread within a bucket, and the
    highest finite bound for what lies beyond. None: nothing was observed."""
    then = dict(before)  # of a histogram with labels, empty before its first observation
    counts = [(bound, max(0.0, count - then.get(bound, 0.0))) for bound, count in after]
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
