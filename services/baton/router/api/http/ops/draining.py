"""The endpoints of a router that drains: its liveness and its metrics."""

from __future__ import annotations

import uuid

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError
from baton.router.api.http.ops.status import StatusEndpoints
from baton.router.api.http.server.envelope import id_headers
from baton.router.api.http.server.failures import error_response
from baton.router.api.service import CompletionService
from baton.router.processes.siblings import Siblings

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
DRAINING = ApiError(503, "This router is about to end; ask another one.", code="draining")


def draining_app(*services: CompletionService, siblings: Siblings | None = None) -> Starlette:
    """Return an application with ``/metrics`` and ``/version`` as ever, and 503 for all else: new requests
    are for other routers, and probes of readiness fail where those of liveness must not."""
    catalogue = Catalogue(services)
    status = StatusEndpoints(catalogue, siblings or Siblings())

    async def elsewhere(request: Request) -> Response:
        minted = request.scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        answer = error_response(DRAINING, request.scope, catalogue.settings.retry_after_seconds)
        answer.raw_headers += id_headers(request.scope, minted)
        answer.headers["connection"] = "close"
        return answer

    return Starlette(
        routes=[
            Route("/metrics", status.metrics),
            Route("/version", status.version),
            Route("/{path:path}", elsewhere, methods=METHODS),
        ]
    )
