"""Metrics of a router's HTTP port: connections, bodies under way, and what is refused."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class HttpMetrics:
    """Counts of one router process. Reasons are words from the code, never a client's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge(
            "baton_http_connections",
            "HTTP connections by what they do: silent (no request yet), idle (between requests), busy.",
            ("state",),
            registry=registry,
        )
        self.body_bytes = Gauge(
            "baton_http_body_bytes",
            "Bytes reserved for request bodies that are being read or parsed.",
            registry=registry,
        )
        self.refused = Counter(
            "baton_http_refused",
            "Connections and requests turned away before any work, by reason.",
            ("reason",),
            registry=registry,
        )
