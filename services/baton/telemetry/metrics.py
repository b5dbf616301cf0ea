"""Counts and durations of the requests that a router answers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.telemetry.goodput import NO_TARGETS, GoodputMetrics, GoodputTargets
from baton.telemetry.http import HttpMetrics
from baton.telemetry.stages import StageMetrics
from baton.telemetry.tally import TallyCounter, TallyHistogram
from baton.telemetry.vllm import with_vllm_names

LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5),
    *(5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
"""Bounds for whole requests and first tokens, in seconds."""

TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
"""Bounds for single tokens, in seconds."""

LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Bounds for the lengths of prompts and answers, in tokens."""


class RouterMetrics:
    """The metrics of a router's requests. Each instance belongs to the registry it is given; nothing is
    global.

    The label ``model`` is the name that the router's configuration gives a model, never what a client wrote.
    """

    def __init__(
        self, registry: CollectorRegistry, targets: GoodputTargets = NO_TARGETS, *, vllm_names: bool = False
    ) -> None:
        self.registry = registry
        self.exported = with_vllm_names(registry, None) if vllm_names else registry
        """The registry that scrapes are answered from."""
        self.stages = StageMetrics(registry)
        self.goodput = GoodputMetrics(registry, targets)
        self.http = HttpMetrics(registry)
        self.requests = Counter(
            "baton_requests",
            "Requests answered, by endpoint and HTTP status (499: the client left first).",
            ("endpoint", "status"),
            registry=registry,
        )
        self.choices = Counter(
            "baton_choices",
            "Generated choices by how they ended: stop, length, cancelled, deadline_exceeded or error.",
            ("endpoint", "model", "finish_reason"),
            registry=registry,
        )
        self.slow_clients = Counter(
            "baton_slow_clients",
            "Streams that were cut off because their client did not read.",
            ("endpoint",),
            registry=registry,
        )
        self.grammar_refusals = Counter(
            "baton_grammar_refusals",
            "Requests refused for their structured output, by tenant: invalid (or beyond the limits), tenant "
            "(its part of trials is used up), overall (too many wait), requests (as many as it may make).",
            ("tenant", "reason"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "baton_requests_in_flight",
            "Requests that are generating now.",
            ("endpoint", "model"),
            registry=registry,
        )
        self.time_to_first_token = self._histogram(
            "baton_time_to_first_token_seconds",
            "From a request's arrival to the first token of each of its choices.",
            LATENCY_BUCKETS,
        )
        self.inter_token_latency = TallyHistogram(
            "baton_inter_token_latency_seconds",
            "Between two consecutive deliveries of one choice.",
            TOKEN_BUCKETS,
            registry,
        )
        self.time_per_output_token = self._histogram(
            "baton_time_per_output_token_seconds",
            "Mean time per token after the first, one observation per choice.",
            TOKEN_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "baton_e2e_latency_seconds",
            "From a request's arrival to the end of its last choice.",
            LATENCY_BUCKETS,
        )
        self.decode_time = self._histogram(
            "baton_decode_seconds",
            "From the first token of a choice to its last, one observation per choice.",
            LATENCY_BUCKETS,
        )
        self.prompt_length = self._histogram(
            "baton_request_prompt_tokens", "Prompt tokens of one accepted request.", LENGTH_BUCKETS
        )
        self.answer_length = self._histogram(
            "baton_request_generated_tokens", "Tokens of one choice that came to its end.", LENGTH_BUCKETS
        )
        self.prompt_tokens = self._counter("baton_prompt_tokens", "Prompt tokens of accepted requests.")
        self.cached_prompt_tokens = self._counter(
            "baton_cached_prompt_tokens", "Prompt tokens found in a prefix cache."
        )
        self.generated_tokens = TallyCounter(
            "baton_generated_tokens", "Tokens delivered by workers.", registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model",), registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model",), registry=self.registry)


class ModelMetrics:
    """The metrics of a router's requests for one model. Labels are looked up once: a lookup costs more than
    the work per token."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self.model = model
        self._metrics = metrics
        self._in_flight: dict[str, Gauge] = {}
        self.time_to_first_token = metrics.time_to_first_token.labels(model)
        self.inter_token_latency = metrics.inter_token_latency.labels(model)
        self.time_per_output_token = metrics.time_per_output_token.labels(model)
        self.e2e_latency = metrics.e2e_latency.labels(model)
        self.decode_time = metrics.decode_time.labels(model)
        self.prompt_length = metrics.prompt_length.labels(model)
        self.answer_length = metrics.answer_length.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_prompt_tokens = metrics.cached_prompt_tokens.labels(model)
        self.generated_tokens = metrics.generated_tokens.labels(model)

    def in_flight(self, endpoint: str) -> Gauge:
        gauge = self._in_flight.get(endpoint)
        if gauge is None:
            gauge = self._in_flight[endpoint] = self._metrics.in_flight.labels(endpoint, self.model)
        return gauge

    def ended(self, endpoint: str, reason: str, choices: int = 1) -> None:
        """Count ``choices`` choices that ended for ``reason``."""
        self._metrics.choices.labels(endpoint, self.model, reason).inc(choices)
