"""Metrics of the state that a router shares with its replicas, and of the limits it enforces."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

DELAY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)


class SharedStateMetrics:
    """Metrics of one router's shared state. The tenants are those of its configuration."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.shared = Gauge(
            "baton_shared_state_up",
            "Whether limits are kept together with other routers: 0 without Redis, and while it fails.",
            registry=registry,
        )
        self.replicas = Gauge(
            "baton_shared_state_replicas", "Routers that Redis knows, this one included.", registry=registry
        )
        self.replicas.set(1)
        self.calls = Counter(
            "baton_shared_state_calls",
            "Calls of Redis: admit, settle, beat; result: ok, or the cause of the failure.",
            ("call", "result"),
            registry=registry,
        )
        self.losses = Counter(
            "baton_shared_state_losses",
            "Times that Redis had forgotten what it was told: flushed, or restarted empty.",
            registry=registry,
        )
        self.delay = Histogram(
            "baton_shared_state_delay_seconds",
            "What asking Redis for its admission took from a request, in vain or not.",
            registry=registry,
            buckets=DELAY_BUCKETS,
        )
        self.decisions = Counter(
            "baton_limit_decisions",
            "Requests of tenants with limits: admitted, or the limit that refused them (requests, tokens, "
            "concurrent, quota), and who counted: redis or local.",
            ("tenant", "decision", "by"),
            registry=registry,
        )
