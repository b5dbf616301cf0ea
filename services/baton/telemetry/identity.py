"""Who a process is, and what it takes of its machine."""

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
    """Of the model; empty while nobody has told the router."""


class IdentityCollector(Collector):
    """``baton_info``, to be joined with other metrics."""

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
    """``baton_info``, and the usual ``process_*`` metrics (CPU, memory, file descriptors; Linux only). For a
    whole process: it ends the client's habit to export when each series was made, as a series of its own."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry.register(IdentityCollector(identities))
    ProcessCollector(registry=registry)
