"""What a worker counts of the routers that beat to it while their event loops are busy."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class BeatMetrics:
    """Belongs to the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        beats = Counter(
            "baton_router_beats",
            "Beats of routers whose event loops were busy: heard, or refused as nobody knows whose they are.",
            ("result",),
            registry=registry,
        )
        self.heard = beats.labels("heard")
        self.refused = beats.labels("refused")
