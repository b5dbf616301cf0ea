"""The authentication of HTTP requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.router.api.audit import AuditLog
from baton.router.api.authentication import Authentication
from baton.router.api.errors import ApiError
from baton.router.api.http.server.failures import error_response
from baton.router.api.http.server.request_headers import header
from baton.router.security.client import Client
from baton.router.ui.files import PAGE_FILES

OPEN = frozenset({"/health", "/ping", "/load", "/metrics", "/version", *PAGE_FILES})
"""The paths for probes and scrapers, which have no key, and the page's files; they reveal nothing about
requests."""


def client_of(request: Request) -> Client:
    """Return the client that sent ``request``, which an `Authenticate` has let in, to a path that is not
    `OPEN`."""
    client: Client = request.scope["state"]["client"]
    return client


class Authenticate:
    """Refuses requests without a known key, where there are keys; of such a request only the headers are
    read. Refuses all others while the audit log is a duty and cannot be written. Plain ASGI, inside the
    request's envelope."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authentication: Authentication,
        audit: AuditLog | None,
        retry_after_seconds: int,
    ) -> None:
        self._app = app
        self._authentication = authentication
        self._audit = audit
        self._retry_after_seconds = retry_after_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                client = self._authentication.client(
                    header(scope, b"authorization"), header(scope, b"x-api-key")
                )
                scope["state"]["client"] = client
                if self._audit is not None:
                    self._audit.check()
            except ApiError as error:
                await error_response(error, scope, self._retry_after_seconds)(scope, receive, send)
                return
        await self._app(scope, receive, send)
