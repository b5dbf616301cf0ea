"""The reading of a request's body: bounded in size, time and total memory, and held until the request is
read."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from baton.router.api.errors import ApiError, shown
from baton.router.api.http.server.bodies import BodyReservation
from baton.router.api.http.server.connection import BODY_GRACE_S, body_due, has_whole_body
from baton.router.api.http.server.disconnect import ClientGoneError
from baton.router.api.http.server.request_headers import header
from baton.router.api.http.server.served import ServedApi
from baton.router.api.prepared import Document, Endpoint, PreparedJob
from baton.router.security.client import Client

_MAX_DIGITS = 18


async def prepared_job(request: Request, endpoint: Endpoint, client: Client, api: ServedApi) -> PreparedJob:
    """Return the request for tokens in the body of ``request``, whose bytes are released.

    Raises ApiError: 408 for a body that comes too slowly, 413 for one over the limit (without reading it),
    415 for another content type, 429 and 503 while too much of other bodies is held; and what `Reading.job`
    raises.
    """
    _check_content_type(header(request.scope, b"content-type"))
    with api.bodies.reservation(client.tenant) as room:
        body = await _read(request, api.catalogue.settings.max_body_bytes, room)
        return await api.reading.job(endpoint, body, client)


async def read_document(request: Request, endpoint: Endpoint, client: Client, api: ServedApi) -> Document:
    """Return the answer to ``request``, for which nothing is generated. Raises as `prepared_job` does."""
    _check_content_type(header(request.scope, b"content-type"))
    with api.bodies.reservation(client.tenant) as room:
        body = await _read(request, api.catalogue.settings.max_body_bytes, room)
        return await api.reading.document(endpoint, body, client)


def _check_content_type(value: str | None) -> None:
    """Refuse other content types, and none: any web page may have a browser send those, without a
    preflight."""
    media_type = (value or "").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        given = "missing" if value is None else shown(value)
        raise ApiError(
            415,
            f"The header content-type must be application/json, not {given}.",
            code="unsupported_media_type",
        )


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
    """Return a body that has come as a whole: nothing is awaited, so nothing can be late."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    body: bytes = message["body"]
    if len(body) > limit:
        raise _too_large(f"more than {limit}", limit)
    room.grow_to(len(body))
    return body


def _declared(request: Request, limit: int) -> int | None:
    """Return the body's declared length; None if none is declared. Raises ApiError for one over the limit."""
    declared = header(request.scope, b"content-length")
    if declared is None or not (declared.isascii() and declared.isdigit()):
        return None
    if len(declared) > _MAX_DIGITS or int(declared) > limit:
        raise _too_large(shown(declared, _MAX_DIGITS).strip('"'), limit)
    return int(declared)


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(413, f"The body has {size} bytes; at most {limit} are allowed.", code="request_too_large")
