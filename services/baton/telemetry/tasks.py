"""Metrics of a process's endless tasks."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class TaskMetrics:
    """Counts of one process. Tasks are named by what they do, never by what they do it for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.failures = Counter(
            "baton_task_failures",
            "Times that an endless task met an error that it does not expect, and was started again.",
            ("task",),
            registry=registry,
        )
