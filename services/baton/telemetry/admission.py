"""Metrics of the queue in front of the ring, collected at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class TenantView:
    """What one tenant has in the queue and in the ring at one moment."""

    tenant: str
    waiting: int
    waiting_prompt_tokens: int
    open_requests: int

    def plus(self, other: TenantView) -> TenantView:
        """Return what the tenant has in two queues together."""
        return replace(
            self,
            waiting=self.waiting + other.waiting,
            waiting_prompt_tokens=self.waiting_prompt_tokens + other.waiting_prompt_tokens,
            open_requests=self.open_requests + other.open_requests,
        )


class AdmissionMetrics:
    """Metrics of requests before they reach the ring."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._views: list[Callable[[], AdmissionView]] = []
        self._tenants: list[Callable[[], Sequence[TenantView]]] = []
        registry.register(_Gauges(self._views, self._tenants))
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

    def tenants(self) -> list[TenantView]:
        """Return what the tenants have here that have anything, by name."""
        return _by_tenant(self._tenants)

    def watch(self, view: Callable[[], AdmissionView], tenants: Callable[[], Sequence[TenantView]]) -> None:
        """Export the state of a queue, and of its tenants, from now on; the figures of several queues are
        added up."""
        self._views.append(view)
        self._tenants.append(tenants)


def _by_tenant(queues: Sequence[Callable[[], Sequence[TenantView]]]) -> list[TenantView]:
    found: dict[str, TenantView] = {}
    for each in (view for tenants in queues for view in tenants()):
        other = found.get(each.tenant)
        found[each.tenant] = each if other is None else other.plus(each)
    return sorted(found.values(), key=lambda view: view.tenant)


class _Gauges(Collector):
    def __init__(
        self,
        views: Sequence[Callable[[], AdmissionView]],
        tenants: Sequence[Callable[[], Sequence[TenantView]]],
    ) -> None:
        self._views = views
        self._tenants = tenants

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
        waiting = GaugeMetricFamily(
            "baton_admission_tenant_waiting_requests",
            "Requests that wait for their turn, by tenant; only of tenants that have requests here.",
            labels=("tenant",),
        )
        for view in _by_tenant(self._tenants):
            waiting.add_metric((view.tenant,), view.waiting)
        yield waiting
