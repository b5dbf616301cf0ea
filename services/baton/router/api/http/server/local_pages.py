"""Protection from web pages for a router that needs no keys because only this machine reaches it.

The user's browser does reach the router, and runs what any page says. A page may send requests to a loopback
address: they state the page's origin. By a name of its own that leads there (DNS rebinding) a page may read
the answers too: its requests state that name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.router.api.errors import ApiError, shown
from baton.router.api.http.server.failures import error_response
from baton.telemetry.http import HttpMetrics

_USUAL = frozenset({"127.0.0.1", "localhost", "::1"})


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, means the machine itself."""
    name = host.lower().removesuffix(".")
    if name in _USUAL or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LocalPages:
    """Lets requests in whose Host is this machine, or that of an allowed origin, and whose Origin, if a page
    sent them, is the same as their Host or an allowed one. Plain ASGI, inside the request's envelope."""

    def __init__(
        self, app: ASGIApp, *, origins: Iterable[str], metrics: HttpMetrics, retry_after_seconds: int
    ) -> None:
        """``origins``: the allowed origins, as for CORS; ``*`` is any."""
        self._app = app
        self._origins = frozenset(origin.lower() for origin in origins)
        self._hosts = frozenset(_netloc(origin) for origin in self._origins)
        self._refused = metrics.refused
        self._retry_after_seconds = retry_after_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "*" not in self._origins:
            host, origin = _told(scope["headers"])
            try:
                self._check(host, origin)
            except ApiError as error:
                await error_response(error, scope, self._retry_after_seconds)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, host: str | None, origin: str | None) -> None:
        """Check Host and Origin. Raises ApiError (403). A request of HTTP/1.0 without a Host is let in, as
        no browser sends one; one of HTTP/1.1 has been refused before."""
        if host is not None and not is_loopback(_name(host)) and host.lower() not in self._hosts:
            self._refused.labels("host").inc()
            raise _forbidden("host", host, "a loopback address, localhost, or the host of an allowed origin")
        if origin is None or origin.lower() in self._origins:
            return
        if host is None or _netloc(origin) != host.lower():
            self._refused.labels("origin").inc()
            raise _forbidden("origin", origin, "this server's own or an allowed one")


def _told(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str | None, str | None]:
    """Return Host and Origin."""
    host = origin = None
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1")
        elif name == b"origin":
            origin = value.decode("latin-1")
    return host, origin


def _name(netloc: str) -> str:
    """Return the host of ``netloc``, without its port."""
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0]


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _forbidden(header: str, value: str, allowed: str) -> ApiError:
    message = (
        f"The header {header} is {shown(value)}; while this router asks for no keys it must be {allowed}. "
        "Allow origins with --allowed-origins, or ask for keys with --api-keys."
    )
    return ApiError(403, message, param=header, code=f"{header}_not_allowed")
