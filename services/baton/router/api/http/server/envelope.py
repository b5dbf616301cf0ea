"""The envelope of every request: its id, its count in the metrics, and an answer if something breaks."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.net.addresses import counted_address
from baton.router.api.audit import AuditLog, AuditRecord
from baton.router.api.errors import as_api_error
from baton.router.api.http.server import anthropic_errors as anthropic
from baton.router.api.http.server.authentication import OPEN
from baton.router.api.http.server.failures import error_response
from baton.router.api.http.server.quiet import Quiet
from baton.router.api.http.server.request_headers import header
from baton.router.api.prepared import CLIENT_ID
from baton.router.traces.origin import Origin
from baton.router.traces.store import Traces
from baton.telemetry.metrics import RouterMetrics


class ArrivedRequest(NamedTuple):
    """What is known of a request before its body is read."""

    request_id: str
    """The request's id, minted by this server: random, never a client's choice."""
    origin: Origin
    """The origin that the client's headers state."""
    record: AuditRecord | None
    """The request's record in the audit log; None: there is no log."""


def arrival_of(request: Request) -> ArrivedRequest:
    """Return what the envelope of ``request`` knows."""
    state = request.scope["state"]
    return ArrivedRequest(state["request_id"], state["origin"], state.get("record"))


def name_request(request: Request, client_id: str) -> None:
    """Take ``client_id``, which the body has, as the client's own id of ``request``, unless its headers have
    one."""
    state = request.scope["state"]
    if state["origin"].client_id is not None:
        return
    state["origin"] = replace(state["origin"], client_id=client_id)
    state["client_id"] = client_id
    record = state.get("record")
    if record is not None:
        record.client_id = client_id


class RequestEnvelope:
    """The outermost middleware. Plain ASGI: it must cost next to nothing for each streamed event."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: RouterMetrics,
        retry_after_seconds: int,
        audit: AuditLog | None = None,
        traces: Traces,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._retry_after_seconds = retry_after_seconds
        self._audit = audit
        self._quiet = Quiet()
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        minted = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = minted
        given = _client_id(scope)
        origin = scope["state"]["origin"] = self._traces.origin(
            None if given is None else given.decode("latin-1"), header(scope, b"traceparent")
        )
        record = self._record(scope, minted, given)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = id_headers(scope, minted)
                if origin.span is not None:
                    own.append((b"traceresponse", origin.span.header.encode()))
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # any error: the client gets an answer in the usual shape
            answer = as_api_error(error, minted)
            if status:
                raise  # too late for an answer: the server logs it and closes the connection
            await error_response(answer, scope, self._retry_after_seconds)(scope, receive, send_with_id)
        finally:
            # The route's pattern, not the path: clients must not be able to make up label values.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, str(status or 499)).inc()
            if record is not None and self._audit is not None:
                record.endpoint, record.status = endpoint, status or 499
                record.client = scope["state"].get("client")
                if not self._quiet.leaves_out(endpoint, scope["path"], status, record.client):
                    self._audit.end(record)

    def _record(self, scope: Scope, minted: str, given: bytes | None) -> AuditRecord | None:
        """Begin the request's record for the audit log, which has none for probes and scrapes."""
        if self._audit is None or scope["path"] in OPEN:
            return None
        caller = scope.get("client")
        record = self._audit.begin(
            minted,
            None if given is None else given.decode("latin-1"),
            address=None if caller is None else counted_address(caller[0])[0],
        )
        scope["state"]["record"] = record
        return record


def id_headers(scope: Scope, minted: str) -> list[tuple[bytes, bytes]]:
    """Return the headers that name a request in its answer: the client's own id if it has one, and the minted
    one."""
    given = _client_id(scope) or scope["state"].get("client_id", minted).encode()
    names = [(b"x-request-id", given), (b"x-baton-request-id", minted.encode())]
    if anthropic.is_at(scope["path"]):
        names.append((b"request-id", given))  # Anthropic's clients look for no other name
    return names


def _client_id(scope: Scope) -> bytes | None:
    """Return the client's own ``X-Request-Id``, if it can be sent back safely."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and CLIENT_ID.fullmatch(value.decode("latin-1")):
            client_id: bytes = value
            return client_id
    return None
