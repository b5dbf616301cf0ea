"""What surrounds every request: its id, its count in the metrics, and an answer when something breaks."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.router.api.errors import as_api_error
from baton.router.api.http.authentication import OPEN
from baton.router.api.http.failures import error_response
from baton.router.api.http.messages import errors as anthropic
from baton.router.api.http.request_headers import header
from baton.router.audit import AuditLog, Record
from baton.router.traces.origin import Origin
from baton.router.traces.store import Traces
from baton.telemetry.metrics import RouterMetrics

QUIET = frozenset({"/ui/data"})
"""Asked every other second by whoever has the page open: the audit log tells of what is refused there."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def request_id_of(request: Request) -> str:
    """The id this server minted for ``request``: random, and no client's to choose."""
    minted: str = request.scope["state"]["request_id"]
    return minted


def origin_of(request: Request) -> Origin:
    """What the client of ``request`` says of where it comes from."""
    origin: Origin = request.scope["state"]["origin"]
    return origin


def record_of(request: Request) -> Record | None:
    """What the audit log is to tell of ``request``; None: there is no log."""
    record: Record | None = request.scope["state"].get("record")
    return record


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
        own = id_headers(scope, minted)
        if origin.span is not None:
            own.append((b"traceresponse", origin.span.header.encode()))
        record = self._record(scope, minted, given)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            if record is not None and self._audit is not None:
                self._audit.check()
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # whatever it is, the client gets an answer in the usual shape
            answer = as_api_error(error, minted)
            if status:
                raise  # too late for an answer: the server logs it and closes the connection
            await error_response(answer, scope, self._retry_after_seconds)(scope, receive, send_with_id)
        finally:
            # The route's pattern, not the path: clients must not be able to make up label values.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, str(status or 499)).inc()
            if record is not None and self._audit is not None and not _is_quiet(scope, status):
                record.endpoint, record.status = endpoint, status or 499
                record.client = scope["state"].get("client")
                self._audit.end(record)

    def _record(self, scope: Scope, minted: str, given: bytes | None) -> Record | None:
        """For the audit log, which tells nothing of probes and scrapes."""
        if self._audit is None or scope["path"] in OPEN:
            return None
        record = self._audit.begin(minted, None if given is None else given.decode("latin-1"))
        scope["state"]["record"] = record
        return record


def id_headers(scope: Scope, minted: str) -> list[tuple[bytes, bytes]]:
    """What names a request in its answer: the client's own id if it has one, and ours."""
    given = _client_id(scope) or minted.encode()
    names = [(b"x-request-id", given), (b"x-baton-request-id", minted.encode())]
    if anthropic.is_at(scope["path"]):
        names.append((b"request-id", given))  # its clients look for no other name
    return names


def _is_quiet(scope: Scope, status: int) -> bool:
    return scope["path"] in QUIET and 200 <= status < 400


def _client_id(scope: Scope) -> bytes | None:
    """The client's own ``X-Request-Id``, when it is one that can be sent back safely."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value.decode("latin-1")):
            client_id: bytes = value
            return client_id
    return None
