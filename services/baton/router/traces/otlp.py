"""Export of traces to an OpenTelemetry collector. Imported only if a collector is named: it needs an
extra."""

from __future__ import annotations

import threading

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.status import Status, StatusCode

import baton
from baton.router.traces.origin import SpanContext
from baton.router.traces.record import RequestTrace
from baton.router.traces.spans import SpanData, spans_of

MAX_WAITING = 32_768
"""Most spans that wait to be sent, about 1,500 requests. More are dropped: requests never wait."""
EVERY_MS = 1000
TIMEOUT_S = 5.0
CLOSE_S = 2.0
MAX_RESOURCES = 4096
"""Most resources that are cached, since workers come and go."""

_SCOPE = InstrumentationScope("baton", baton.__version__)


class Exporter:
    """Sends the spans of sampled requests, on a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._processor = BatchSpanProcessor(
            exporter, max_queue_size=MAX_WAITING, schedule_delay_millis=EVERY_MS
        )
        self._resources: dict[tuple[str, str | None], Resource] = {}

    @classmethod
    def to(cls, endpoint: str) -> Exporter:
        """Return an exporter. ``endpoint``: http://host:port of a collector's OTLP over gRPC; https:// for
        TLS."""
        insecure = not endpoint.startswith("https://")
        return cls(OTLPSpanExporter(endpoint, insecure=insecure, timeout=TIMEOUT_S))

    def on_end(self, trace: RequestTrace) -> None:
        span = trace.origin.span
        if span is None or not span.sampled:
            return
        for data in spans_of(trace):
            self._processor.on_end(self._span(trace, span, data))

    def close(self) -> None:
        """Send the spans that wait, for at most ``CLOSE_S`` seconds."""
        # shutdown goes on for minutes if the collector does not answer, whatever its timeout.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _span(self, trace: RequestTrace, root: SpanContext, data: SpanData) -> ReadableSpan:
        parent = trace.origin.parent
        above = _context(root.trace_id, data.parent) if data.parent is not None else None
        if data.parent is None and parent is not None:
            above = _context(parent.trace_id, parent.span_id, remote=True)
        began = trace.wall + data.start
        return ReadableSpan(
            data.name,
            context=_context(root.trace_id, data.span_id),
            parent=above,
            resource=self._resource(data),
            attributes=dict(data.attributes),
            kind=api.SpanKind.SERVER if data.span_id == root.span_id else api.SpanKind.INTERNAL,
            status=Status() if data.error is None else Status(StatusCode.ERROR, data.error),
            start_time=round(1e9 * began),
            end_time=round(1e9 * (began + data.seconds)),
            instrumentation_scope=_SCOPE,
        )

    def _resource(self, data: SpanData) -> Resource:
        key = data.service, data.instance
        if key not in self._resources:
            if len(self._resources) >= MAX_RESOURCES:
                self._resources.clear()
            named = {"service.name": data.service, "service.namespace": "baton"}
            if data.instance is not None:
                named["service.instance.id"] = data.instance
            self._resources[key] = Resource(named)
        return self._resources[key]


def _context(trace_id: int, span_id: int, *, remote: bool = False) -> api.SpanContext:
    return api.SpanContext(trace_id, span_id, remote, api.TraceFlags(api.TraceFlags.SAMPLED))
