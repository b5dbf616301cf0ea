"""What a worker measures of the changes of its role."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

Result = Literal["switched", "timeout", "interrupted"]
"""It has the other role; something could not be ended, and it has the old one; it was told to end."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class SwitchMetrics:
    """Belongs to the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._switches = Counter(
            "baton_role_switches",
            "Switches of role that have ended: switched, timeout (something could not be ended, and the old "
            "role stayed) or interrupted (the worker was told to end).",
            ("from", "to", "result"),
            registry=registry,
        )
        self._seconds = Histogram(
            "baton_role_switch_seconds",
            "From a switch's beginning until the worker served in its new role.",
            ("from", "to"),
            registry=registry,
            buckets=SECONDS,
        )

    def ended(self, was: str, wanted: str, result: Result, seconds: float) -> None:
        self._switches.labels(was, wanted, result).inc()
        if result == "switched":
            self._seconds.labels(was, wanted).observe(seconds)
