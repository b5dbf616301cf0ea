"""The header that says how long a client will wait for its answer."""

from __future__ import annotations

from starlette.requests import Request

from baton.router.api.errors import invalid, shown
from baton.router.api.http.server.request_headers import header

TIMEOUT_HEADER = "x-request-timeout"


def timeout_of(request: Request) -> float | None:
    """Return the client's timeout in seconds; None without the header. Raises RequestError if it is not a
    number."""
    given = header(request.scope, TIMEOUT_HEADER.encode())
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        raise invalid(
            TIMEOUT_HEADER, f"{TIMEOUT_HEADER} must be a number of seconds, not {shown(given)}."
        ) from None
