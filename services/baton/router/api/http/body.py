"""Reading a request's body: bounded, JSON, strictly typed, with errors that name the field."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from baton.router.api.errors import ApiError, RequestError, invalid, shown
from baton.router.api.http.authentication import client_of
from baton.router.api.http.bodies import BodyBudget, BodyReservation
from baton.router.api.http.connection import BODY_GRACE_S, body_due
from baton.router.api.http.disconnect import ClientGoneError
from baton.router.api.http.unsupported import refuse_unsupported
from baton.router.api.settings import ApiSettings
from baton.router.shared.limits import Tenant
from baton.text.config import Json

Body = TypeVar("Body", bound=msgspec.Struct)

_MISSING = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]{1,9})\]")
_MOST_DIGITS = 18
_LONGEST_PROBLEM = 200


async def read_request(request: Request, type_: type[Body], settings: ApiSettings) -> Body:
    """The body of ``request`` as ``type_``.

    Raises ApiError: 408 for a body that comes too slowly, 413 for one over the limit (without reading it),
    415 for another content type, 429 and 503 while too much of other bodies is held; and RequestError for
    anything that is not what the endpoint takes.
    """
    _check_content_type(request.headers.get("content-type"))
    with _reservation(request) as room:
        body = await _read(request, settings.max_body_bytes, room)
        return decode(body, type_, ignore_unknown=settings.ignore_unknown_fields)


def decode(body: bytes, type_: type[Body], *, ignore_unknown: bool = False) -> Body:
    """``body`` as ``type_``; see `read_request` for what it raises."""
    if not body.strip():
        raise invalid(None, "The request has no body; it must be a JSON object.", "invalid_json")
    try:
        # First without types, so that an error can show the value that was sent.
        document: Json = msgspec.json.decode(body)
    except RecursionError:
        raise invalid(None, "The body is nested too deeply.", "invalid_json") from None
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not UTF-8: {error.reason}.", "invalid_json") from None
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(document, dict):
        raise invalid(None, f"The body must be a JSON object, not {shown(document)}.", "invalid_type")
    refuse_unsupported(document, type_.__struct_fields__, ignore_unknown=ignore_unknown)
    try:
        return msgspec.convert(document, type_)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), document) from None


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
    declared = request.headers.get("content-length", "")
    expected: int | None = None
    if declared.isascii() and declared.isdigit():
        if len(declared) > _MOST_DIGITS or int(declared) > limit:
            raise _too_large(shown(declared, _MOST_DIGITS).strip('"'), limit)
        expected = int(declared)
        room.grow_to(expected)
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


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(413, f"The body has {size} bytes; at most {limit} are allowed.", code="request_too_large")


def _type_error(message: str, document: Json) -> RequestError:
    """``message`` is msgspec's. It may quote a name that the client has chosen: its end says where."""
    problem, located, path = message.rpartition(" - at `$")
    if not located:
        problem, path = message, "`"
    path = path.removesuffix("`").removesuffix("[...]")  # an entry of a mapping, which is not told
    missing = _MISSING.fullmatch(problem)
    if missing:
        param = f"{path}.{missing[1]}".removeprefix(".")
        return invalid(param, f"{param} is required.", "missing_required_parameter")
    param = path.removeprefix(".")
    problem = problem[:1].lower() + problem[1:].replace("`", "")
    if len(problem) > _LONGEST_PROBLEM:
        problem = problem[: _LONGEST_PROBLEM - 1] + "…"
    return invalid(param or None, f"{param}: {problem} ({_shown_at(document, path)}).", "invalid_type")


def _shown_at(document: Json, path: str) -> str:
    """The value at ``path``, in the notation of msgspec's errors; … where that leads nowhere."""
    value = document
    end = 0
    for step in _STEP.finditer(path):
        name, index = step.groups()
        if step.start() != end:
            return "…"
        end = step.end()
        if name and isinstance(value, dict) and name in value:
            value = value[name]
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return "…"
    return shown(value) if end == len(path) else "…"
