"""A copy of a registry's metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class Snapshot(Collector):
    """The metrics of a registry at the moment of construction, for another thread to read."""

    def __init__(self, registry: Collector) -> None:
        self._families = list(registry.collect())

    def collect(self) -> Iterator[Metric]:
        yield from self._families
