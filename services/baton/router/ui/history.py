"""The last minutes of a router for its live page: a point every two seconds, made from the metrics."""

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
MAX_POINTS = 150
"""Most points that are kept: five minutes."""
WINDOW = 5
"""The points over which the quantiles and rates of a point are computed: ten seconds."""

TOTALS = "totals"
"""The name of the question that the processes of a router ask each other."""

Buckets = tuple[tuple[float, float], ...]
"""(upper bound, observations up to the bound), ascending; the last bound is infinite."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The counts since the router started, and the requests in flight and waiting, at one moment."""

    in_flight: float
    waiting: float
    prompt_tokens: float
    generated_tokens: float
    answers: float
    """The answers that have ended in any way."""
    ttft: Buckets
    itl: Buckets


@dataclass(frozen=True, slots=True)
class Point:
    """One point: rates per second, and quantiles in milliseconds, None if nothing was observed."""

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
    """The history of all processes of a router together. Event loop's thread only."""

    def __init__(
        self,
        metrics: RouterMetrics,
        rings: Sequence[RingSource],
        waiting: Callable[[], int],
        siblings: Siblings | None = None,
    ) -> None:
        """``waiting`` returns the number of requests queued in front of the rings."""
        self._metrics = metrics
        self._rings = rings
        self._waiting = waiting
        self._siblings = siblings or Siblings()
        self._siblings.on(TOTALS, self._tell_totals)
        self._others: dict[int, Totals] = {}
        self._seen: deque[tuple[float, Totals]] = deque([(time.monotonic(), self._mine())], maxlen=WINDOW + 1)
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)

    async def run(self) -> NoReturn:
        """Add points for as long as the router lives."""
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
                # A process that replaces a dead one begins at 0, so that the sum may shrink.
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
        """Return all that the page shows."""
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
            "most_points": MAX_POINTS,
        }

    def _workers(self) -> list[dict[str, object]]:
        found = [(ring.model, view) for ring in self._rings for view in ring.views()]
        found.sort(key=lambda each: (each[0], each[1].role, each[1].address))
        return [{**asdict(view), "model": model} for model, view in found]

    async def totals(self) -> Totals:
        """Return the totals of all processes."""
        for index, told in (await self._siblings.ask(TOTALS)).items():
            self._others[index] = msgspec.msgpack.decode(told, type=Totals)
        return _sum([self._mine(), *self._others.values()])  # of a silent process, its last answer

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
    """Return the sum of a metric over all labels."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))


def buckets_of(histogram: Collector) -> Buckets:
    """Return the sum of a histogram's buckets over all labels."""
    samples = (sample for family in histogram.collect() for sample in family.samples)
    return _added(
        [(float(sample.labels["le"]), sample.value)] for sample in samples if sample.name.endswith("_bucket")
    )


def quantile(share: float, before: Buckets, after: Buckets) -> float | None:
    """Return a quantile of the observations between ``before`` and ``after``, None without observations. The
    estimate is that of Prometheus: evenly spread within a bucket, and the highest finite bound beyond it."""
    then = dict(before)  # empty for a histogram with labels before its first observation
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
