"""The metrics port of a program that has no HTTP server of its own."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry

from baton.telemetry.exposition import MetricsPort


async def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, stack: contextlib.AsyncExitStack
) -> int | None:
    """Serve ``/metrics`` over HTTP until ``stack`` unwinds. Returns the port, or None if ``port`` is -1.

    Raises OSError if the port cannot be bound.
    """
    if port < 0:
        return None
    serving = MetricsPort(registry)
    stack.push_async_callback(serving.close)
    return await serving.open(host, port)
