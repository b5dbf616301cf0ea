"""A small OpenTelemetry collector: it takes spans over gRPC, and keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass
class Spans(pb_grpc.TraceServiceServicer):
    """What came: (service, span)."""

    taken: list[tuple[str, Any]] = field(default_factory=list)

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:  # noqa: N802
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.taken += [(named["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> dict[str, tuple[str, Any]]:
        """Those of one trace, by name."""
        return {span.name: (service, span) for service, span in self.taken if span.trace_id.hex() == trace_id}


@contextmanager
def collector() -> Iterator[tuple[str, Spans]]:
    """Its URL, and what it has taken."""
    server = grpc.server(ThreadPoolExecutor(1))
    spans = Spans()
    pb_grpc.add_TraceServiceServicer_to_server(spans, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", spans
    finally:
        server.stop(0).wait()
