"""Reading a request's body: bounded in size, in time and in all, and held until what it asks for is known."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from baton.router.api.errors import ApiError, shown
from baton.router.api.http.authentication import client_of
from baton.router.api.http.bodies import BodyBudget, BodyReservation
from baton.router.api.http.connection import BODY_GRACE_S, body_due, has_whole_body
from baton.router.api.http.disconnect import ClientGoneError
from baton.router.api.http.request_headers import header
from baton.router.api.prepared import Endpoint, PreparedJob
from baton.router.api.reading import Reading
from baton.router.api.settings import ApiSettings
from baton.router.shared.limits import Tenant

_MOST_DIGITS = 18


async def read_job(
    request: Request, endpoint: Endpoint, reading: Reading, settings: ApiSettings
) -> PreparedJob:
    """The request for tokens that the body of ``request`` is, of which nothing is held afterwards.

    Raises ApiError: 408 for a body that comes too slowly, 413 for one over the limit (without reading it),
    415 for another content type, 429 and 503 while too much of other bodies is held; and what
    `Reading.job` raises.
    """
    _check_content_type(header(request.scope, b"content-type"))
    with _reservation(request) as room:
        body = await _read(request, settings.max_body_bytes, room)
        return await reading.job(endpoint, body, client_of(request))


async def read_document(
    request: Request, endpoint: Endpoint, reading: Reading, settings: ApiSettings
) -> bytes:
    """The answer to ``request``, for which nothing is generated. Raises as `read_job` does."""
    _check_content_type(header(request.scope, b"content-type"))
    with _reservation(request) as room:
        body = await _read(request, settings.max_body_bytes, room)
        return await reading.document(endpoint, body, client_of(request))


def _check_content_type(value: str | None) -> None:
    """Any page of the web may have a browser send what has another type, or none, without being asked."""
    media_type = (value or "").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        given = "missing" if value is None else shown(value)
        raise ApiError(
            415,
            f"The header content-type must be application/json, not {given}.",
            code="unsupported_media_type",
        )


def _reservation(request: Request) -> BodyReservation:
    budget: BodyBudget = request.app.state.bodies
    client = client_of(request)
    return budget.reservation(Tenant() if client is None else client.tenant)


async def _read(request: Request, limit: int, room: BodyReservation) -> bytes:
    expected = _declared(request, limit)
    if expected is not None:
        room.grow_to(expected)
    if has_whole_body(request.scope):
        return await _take(request, limit, room)
    chunks: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    due = loop.time() + BODY_GRACE_S
    try:
        async with asyncio.timeout_at(due) as patience:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(f"more than {limit}", limit)
                room.grow_to(size)
                chunks.append(chunk)
                if size != expected:
                    due = body_due(due, loop.time(), len(chunk))
                    patience.reschedule(due)
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise room.too_slow(size) from None
    return b"".join(chunks)


async def _take(request: Request, limit: int, room: BodyReservation) -> bytes:
    """A body that has come: there is nothing to wait for, and so nothing to be late."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    body: bytes = message["body"]
    if len(body) > limit:
        raise _too_large(f"more than {limit}", limit)
    room.grow_to(len(body))
    return body


def _declared(request: Request, limit: int) -> int | None:
    """How long the body is to be; None: it is not told. Raises ApiError for one over the limit."""
    declared = header(request.scope, b"content-length")
    if declared is None or not (declared.isascii() and declared.isdigit()):
        return None
    if len(declared) > _MOST_DIGITS or int(declared) > limit:
        raise _too_large(shown(declared, _MOST_DIGITS).strip('"'), limit)
    return int(declared)


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(413, f"The body has {size} bytes; at most {limit} are allowed.", code="request_too_large")
