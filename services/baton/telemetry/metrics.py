"""Every metric of Baton: its name, unit, labels and buckets. No other module names one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds for whole requests and first tokens."""

TOKEN_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds for single tokens."""


class RouterMetrics:
    """What a router counts. Each instance belongs to the registry it is given; nothing is global."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "baton_requests",
            "Requests answered, by endpoint and HTTP status (499: the client left first).",
            ("endpoint", "status"),
            registry=registry,
        )
        self.choices = Counter(
            "baton_choices",
            "Generated choices by how they ended: stop, length, cancelled, deadline_exceeded or error.",
            ("endpoint", "finish_reason"),
            registry=registry,
        )
        self.slow_clients = Counter(
            "baton_slow_clients",
            "Streams that were cut off because their client did not read.",
            ("endpoint",),
            registry=registry,
        )
        self.in_flight = Gauge(
            "baton_requests_in_flight",
            "Requests that are generating now.",
            ("endpoint",),
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "baton_time_to_first_token_seconds",
            "From a request's arrival to the first token of each of its choices.",
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self.inter_token_latency = Histogram(
            "baton_inter_token_latency_seconds",
            "Between two consecutive deliveries of one choice.",
            registry=registry,
            buckets=TOKEN_BUCKETS,
        )
        self.time_per_output_token = Histogram(
            "baton_time_per_output_token_seconds",
            "Mean time per token after the first, one observation per choice.",
            registry=registry,
            buckets=TOKEN_BUCKETS,
        )
        self.e2e_latency = Histogram(
            "baton_e2e_latency_seconds",
            "From a request's arrival to the end of its last choice.",
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self.prompt_tokens = Counter(
            "baton_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self.cached_prompt_tokens = Counter(
            "baton_cached_prompt_tokens", "Prompt tokens found in a prefix cache.", registry=registry
        )
        self.generated_tokens = Counter(
            "baton_generated_tokens", "Tokens delivered by workers.", registry=registry
        )
