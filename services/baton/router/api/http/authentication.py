"""Who sends an HTTP request."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.router.api.authentication import Authentication
from baton.router.api.errors import ApiError, invalid
from baton.router.api.http.failures import error_response
from baton.router.api.http.request_headers import header
from baton.router.security.client import Client
from baton.router.shared.limits import Tenant

OPEN = frozenset({"/health", "/metrics", "/version", "/ui", "/ui/page.js", "/ui/page.css"})
"""Paths for probes and scrapers, which have no key, and the page's files; they tell nothing of requests."""

LONGEST_SALT = 256


def client_of(request: Request) -> Client | None:
    """Who sends ``request``; None outside of an `Authenticate`."""
    client: Client | None = request.scope["state"].get("client")
    return client


def cache_salt(request: Request, given: str | None) -> bytes:
    """Among whom the cached blocks of ``request`` are shared. Raises RequestError for a salt too long."""
    if given is not None and not 1 <= len(given) <= LONGEST_SALT:
        raise invalid("cache_salt", f"cache_salt must have 1 to {LONGEST_SALT} characters, not {len(given)}.")
    return (client_of(request) or Client(tenant=Tenant())).cache_salt(given)


class Authenticate:
    """Lets nobody in without a known key, where there are keys. Of a stranger's request nothing is read but
    its headers. Plain ASGI, inside of the request's envelope."""

    def __init__(self, app: ASGIApp, *, authentication: Authentication, retry_after_seconds: int) -> None:
        self._app = app
        self._authentication = authentication
        self._retry_after_seconds = retry_after_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                client = self._authentication.client(
                    header(scope, b"authorization"), header(scope, b"x-api-key")
                )
            except ApiError as error:
                await error_response(error, scope, self._retry_after_seconds)(scope, receive, send)
                return
            scope["state"]["client"] = client
        await self._app(scope, receive, send)
