"""Metrics from stats whose fields say what they are exported as.

Stats are read at each scrape, so that counting costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.process.exported import exported_figures
from baton.telemetry.roles import CountedByRole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class StatsCollector(Collector):
    """Exports all marked fields of the stats that ``stats`` returns. Any thread may call ``stats``."""

    def __init__(self, counted: CountedByRole, stats: Callable[[], DataclassInstance]) -> None:
        self._counted = counted
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        return families(self._counted, self._stats())


def families(counted: CountedByRole, stats: DataclassInstance) -> Iterator[Metric]:
    """Yield a metric for each marked field of a dataclass, with the role as its label; counters are split by
    the roles in which they counted."""
    for metric, value in exported_figures(stats):
        if metric.kind == "gauge":
            yield gauge_family(counted, metric.name, metric.text, value)
        else:
            yield _counter_family(counted, metric.name, metric.text, value)


def gauge_family(counted: CountedByRole, name: str, text: str, value: float) -> Metric:
    """Return a gauge whose only label is the role."""
    family = GaugeMetricFamily(name, text, labels=("role",))
    family.add_metric((counted.role,), value)
    return family


def _counter_family(counted: CountedByRole, name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=("role",))
    for role, count in counted.split((name,), value).items():
        family.add_metric((role,), count)
    return family
