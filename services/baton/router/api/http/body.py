"""Reading a request's body, bounded. What it says is read by ``preparing``."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from baton.router.api.errors import ApiError, shown
from baton.router.api.http.disconnect import ClientGoneError
from baton.router.api.settings import ApiSettings


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """The body of ``request``.

    Raises ApiError: 413 for a body over the limit (without reading it), 415 for another content type.
    """
    _check_content_type(request.headers.get("content-type"))
    return await _read(request, settings.max_body_bytes)


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
