"""Metrics of a worker's changes of role."""

from __future__ import annotations

from itertools import permutations
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton.core.role import ROLES, Role

Result = Literal["switched", "timeout", "interrupted"]
"""How a change of role ended: the worker has the new role; it kept the old role, as some work could not be
ended in time; or it was told to stop meanwhile."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class SwitchMetrics:
    """Metrics of one worker's changes of role. Each instance belongs to the registry it is given."""

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
        for was, wanted in permutations(ROLES, 2):
            for result in get_args(Result):  # exported as 0 from the start, or the first one goes unseen
                self._switches.labels(was, wanted, result)

    def ended(self, was: Role, wanted: Role, result: Result, seconds: float) -> None:
        self._switches.labels(was, wanted, result).inc()
        if result == "switched":
            self._seconds.labels(was, wanted).observe(seconds)
