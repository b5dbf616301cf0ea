"""Metrics of how many requests met their targets, and why the others did not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Missed = Literal["none", "ttft", "itl", "error"]
"""The target that a request missed first."""


@dataclass(frozen=True, slots=True)
class GoodputTargets:
    """Upper limits, in seconds; None: no limit."""

    ttft: float | None = None
    """The limit on the time to first token of each choice."""
    itl: float | None = None
    """The limit on all inter-token latencies of a choice but one in a hundred."""

    def __bool__(self) -> bool:
        return self.ttft is not None or self.itl is not None


NO_TARGETS = GoodputTargets()


class GoodputMetrics:
    """Counts of requests by target missed. Each instance belongs to the registry it is given."""

    def __init__(self, registry: CollectorRegistry, targets: GoodputTargets) -> None:
        self.targets = targets
        self._requests = Counter(
            "baton_slo_requests",
            "Requests by the target they missed (none, ttft, itl, error) and why. Only with --slo-ttft or "
            "--slo-itl. Those whose client left, whose own deadline passed or that were at fault themselves, "
            "and those refused before their turn, do not count.",
            ("model", "missed", "cause"),
            registry=registry,
        )
        limits = Gauge(
            "baton_slo_target_seconds",
            "The targets: ttft and itl, as far as there are any.",
            ("target",),
            registry=registry,
        )
        for name, limit in (("ttft", targets.ttft), ("itl", targets.itl)):
            if limit is not None:
                limits.labels(name).set(limit)

    def counts(self) -> dict[tuple[str, str], float]:
        """Return the requests so far of all models, by the target missed and the cause."""
        found: dict[tuple[str, str], float] = {}
        for sample in (sample for family in self._requests.collect() for sample in family.samples):
            if sample.name.endswith("_total"):
                key = sample.labels["missed"], sample.labels["cause"]
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def ended(self, model: str, missed: Missed, cause: str) -> None:
        """Count a request that is over. ``cause`` is one of few words, and empty if no target was missed."""
        self._requests.labels(model, "none", "")  # the series exists from the first request on, be it 0
        self._requests.labels(model, missed, cause).inc()
