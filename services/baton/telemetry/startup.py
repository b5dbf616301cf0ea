"""The metric of how long each phase of a start took."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.process.start_clock import StartTimes


class StartCollector(Collector):
    """Exports the phases of a worker's start."""

    def __init__(self, role: str, times: StartTimes) -> None:
        self._role = role
        self._times = times

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "baton_startup_seconds",
            "What the start took, by phase; their sum is the whole of it.",
            labels=("role", "phase"),
        )
        for phase, seconds in self._times.phases.items():
            family.add_metric((self._role, phase), seconds)
        yield family
