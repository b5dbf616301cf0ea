"""Metrics of a router's audit log."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class AuditMetrics:
    """Metrics of one router's audit log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge(
            "baton_audit_log_up",
            "Whether the audit log, if there is one, could be written when that was last tried.",
            registry=registry,
        )
        self.up.set(1)
        self.lost = Counter(
            "baton_audit_lines_lost",
            "Lines of the audit log that could not be written: one for each request that has ended.",
            registry=registry,
        )
