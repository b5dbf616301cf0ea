"""Metrics of the processes that read large bodies and chats."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class PreparationMetrics:
    """Metrics of bodies that are not read on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "baton_preparation_seconds",
            "How long large bodies and chats waited for a process and were read in it.",
            registry=registry,
            buckets=SECONDS_BUCKETS,
        )
        self.refused = Counter(
            "baton_preparation_refused",
            "Large bodies and chats refused unread: tenant (more than its share waits), overall.",
            ("tenant", "reason"),
            registry=registry,
        )
        self.lost = Counter(
            "baton_preparation_processes_lost",
            "Processes that ended over a body: too_complex (CPU time, memory), template (its CPU time), "
            "too_long, died.",
            ("reason",),
            registry=registry,
        )
        self._processes = Gauge(
            "baton_preparation_processes", "Processes that read large bodies and chats.", registry=registry
        )

    def watch(self, processes: Callable[[], int]) -> None:
        """Export the number of processes, which ``processes`` returns at each scrape."""
        self._processes.set_function(processes)
