"""Metrics of the beats that a worker gets from routers while their event loops are busy."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class BeatMetrics:
    """Counts of beats. Each instance belongs to the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        beats = Counter(
            "baton_router_beats",
            "Beats of routers whose event loops were busy: heard, or refused as nobody knows whose they are.",
            ("result",),
            registry=registry,
        )
        self.heard = beats.labels("heard")
        self.refused = beats.labels("refused")
