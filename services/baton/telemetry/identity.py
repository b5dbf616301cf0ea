"""The identity of a process, and the resources that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import baton


@dataclass(frozen=True, slots=True)
class Identity:
    """One role of a process, for one model."""

    role: str
    model: str
    revision: str
    """The model's revision; empty while the router does not know it."""


class IdentityCollector(Collector):
    """Exports ``baton_info``, to be joined with other metrics."""

    def __init__(self, identities: Callable[[], Sequence[Identity]]) -> None:
        self._identities = identities

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "baton_info",
            "1, with the version of Baton, and the model and its revision as labels.",
            labels=("role", "model", "revision", "version"),
        )
        for who in self._identities():
            family.add_metric((who.role, who.model, who.revision, baton.__version__), 1)
        yield family


def export_identity(registry: CollectorRegistry, identities: Callable[[], Sequence[Identity]]) -> None:
    """Export ``baton_info``, and the usual ``process_*`` metrics (CPU, memory, file descriptors; Linux only).

    Affects the whole process: prometheus_client no longer exports the time at which each series was made as a
    series of its own.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry.register(IdentityCollector(identities))
    ProcessCollector(registry=registry)
