"""Metrics of how a router finds its workers."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class DiscoveryCounts:
    """Counts of a router's requests to the API server. The labels' values are few and fixed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lists = Counter(
            "baton_discovery_lists",
            "Lists by result: ok, timeout, gone, http_4xx, http_5xx, connection or malformed.",
            ("result",),
            registry=registry,
        )
        self.watches = Counter(
            "baton_discovery_watches",
            "Watches by what ended them: end (in time), early, silent (given up), or as for lists.",
            ("reason",),
            registry=registry,
        )
        self.events = Counter(
            "baton_discovery_events",
            "Events of watches by type: ADDED, MODIFIED, DELETED, BOOKMARK, other.",
            ("type",),
            registry=registry,
        )


@dataclass(frozen=True, slots=True)
class EndpointView:
    """One worker as discovery describes it."""

    role: str
    """The worker's role; ``unknown`` until it is known."""
    state: str
    """One of ready, not_ready and terminating."""


@dataclass(frozen=True, slots=True)
class DiscoverySource:
    """How the workers of one model are found."""

    model: str
    staleness_s: Callable[[], float]
    endpoints: Callable[[], Sequence[EndpointView]]


class DiscoveryCollector(Collector):
    """Exports what discovery knows at each scrape."""

    def __init__(self, sources: Sequence[DiscoverySource]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        staleness = GaugeMetricFamily(
            "baton_discovery_staleness_seconds",
            "Since the set of workers was last confirmed; +Inf before it was first known.",
            labels=("model",),
        )
        known = GaugeMetricFamily(
            "baton_discovery_endpoints",
            "Workers that discovery knows: ready, not_ready, terminating.",
            labels=("role", "state", "model"),
        )
        for source in self._sources:
            staleness.add_metric((source.model,), source.staleness_s())
            for view, count in sorted(Tally(source.endpoints()).items(), key=lambda item: str(item[0])):
                known.add_metric((view.role, view.state, source.model), count)
        yield staleness
        yield known
