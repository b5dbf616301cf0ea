"""Metrics of the queue in front of the ring, collected at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

WAIT_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The queue in front of the ring at one moment."""

    waiting: int
    waiting_prompt_tokens: int
    open_answers: int
    open_tokens: int
    seats: int


class AdmissionMetrics:
    """Metrics of requests before they reach the ring."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._views: list[Callable[[], AdmissionView]] = []
        registry.register(_Gauges(self._views))
        self.refused = Counter(
            "baton_admission_refused",
            "Requests refused at once, or after waiting: tenant (more than its share), overall, timeout.",
            ("tenant", "reason"),
            registry=registry,
        )
        self.admitted_tokens = Counter(
            "baton_admission_tokens",
            "Tokens of prompts and answers that were let in, by tenant.",
            ("tenant",),
            registry=registry,
        )
        self.wait = Histogram(
            "baton_admission_wait_seconds",
            "How long requests that were let in had waited for their turn.",
            registry=registry,
            buckets=WAIT_BUCKETS,
        )

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return sum(view().waiting for view in self._views)

    def watch(self, view: Callable[[], AdmissionView]) -> None:
        """Export the state of a queue from now on; the figures of several queues are added up."""
        self._views.append(view)


class _Gauges(Collector):
    def __init__(self, views: Sequence[Callable[[], AdmissionView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[GaugeMetricFamily]:
        views = [view() for view in self._views]
        for family, values in (
            (
                GaugeMetricFamily("baton_admission_waiting_requests", "Requests that wait for their turn."),
                [view.waiting for view in views],
            ),
            (
                GaugeMetricFamily(
                    "baton_admission_waiting_prompt_tokens", "Prompt tokens of the requests that wait."
                ),
                [view.waiting_prompt_tokens for view in views],
            ),
            (
                GaugeMetricFamily("baton_admission_open_answers", "Answers under way in the ring."),
                [view.open_answers for view in views],
            ),
            (
                GaugeMetricFamily(
                    "baton_admission_open_tokens", "Tokens of the answers under way, as estimated."
                ),
                [view.open_tokens for view in views],
            ),
            (
                GaugeMetricFamily(
                    "baton_admission_seats", "Answers that may be under way at once; 0: not known."
                ),
                [view.seats for view in views],
            ),
        ):
            family.add_metric((), sum(values))
            yield family
