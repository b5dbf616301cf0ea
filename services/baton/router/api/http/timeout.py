"""How long a client will wait for its answer, as it says in a header."""

from __future__ import annotations

from starlette.requests import Request

from baton.router.api.errors import invalid, shown
from baton.router.api.http.request_headers import header

TIMEOUT_HEADER = "x-request-timeout"


def timeout_of(request: Request) -> float | None:
    """Seconds; None without the header. Raises ApiError when it is no number."""
    given = header(request.scope, TIMEOUT_HEADER.encode())
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        raise invalid(
            TIMEOUT_HEADER, f"{TIMEOUT_HEADER} must be a number of seconds, not {shown(given)}."
        ) from None
