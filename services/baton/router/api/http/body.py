"""Reading a request's body: bounded, JSON, strictly typed, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from baton.router.api.errors import ApiError, RequestError, invalid, shown
from baton.router.api.http.disconnect import ClientGoneError
from baton.router.api.http.unsupported import refuse_unsupported
from baton.router.api.settings import ApiSettings
from baton.text.config import Json

Body = TypeVar("Body", bound=msgspec.Struct)

_LOCATED = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


async def read_request(request: Request, type_: type[Body], settings: ApiSettings) -> Body:
    """The body of ``request`` as ``type_``.

    Raises ApiError: 413 for a body over the limit (without reading it), 415 for another content type; and
    RequestError for anything that is not what the endpoint takes.
    """
    _check_content_type(request.headers.get("content-type"))
    body = await _read(request, settings.max_body_bytes)
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
    media_type = (value or "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415,
            f"The content type must be application/json, not {shown(value)}.",
            code="unsupported_media_type",
        )


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_large(declared, limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(f"more than {limit}", limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(chunks)


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(413, f"The body has {size} bytes; at most {limit} are allowed.", code="request_too_large")


def _type_error(message: str, document: Json) -> RequestError:
    located = _LOCATED.fullmatch(message)
    problem, path = (located["problem"], located["path"] or "") if located else (message, "")
    path = path.removesuffix("[...]")  # an entry of a mapping, which is not told
    missing = _MISSING.fullmatch(problem)
    if missing:
        param = f"{path}.{missing[1]}".removeprefix(".")
        return invalid(param, f"{param} is required.", "missing_required_parameter")
    param = path.removeprefix(".")
    problem = problem[:1].lower() + problem[1:].replace("`", "")
    return invalid(param or None, f"{param}: {problem} ({shown(_at(document, path))}).", "invalid_type")


def _at(document: Json, path: str) -> Json:
    """The value at ``path``, in the notation of msgspec's errors."""
    value = document
    for name, index in _STEP.findall(path):
        if isinstance(value, dict) and name:
            value = value.get(name)
        elif isinstance(value, list) and index:
            value = value[int(index)]
    return value
