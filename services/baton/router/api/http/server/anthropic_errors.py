"""Errors in Anthropic's shape, at the paths of its API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import orjson

from baton.router.api.errors import ApiError

ENDPOINT = "/v1/messages"

OVERLOADED = 529
"""The status of Anthropic's API where OpenAI's has 503."""

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def is_at(path: str) -> bool:
    """Whether errors at ``path`` have Anthropic's shape."""
    return path == ENDPOINT or path.startswith(f"{ENDPOINT}/")


def status_of(error: ApiError) -> int:
    """Return the HTTP status of ``error``."""
    return OVERLOADED if error.status == 503 else error.status


def error_fields(error: ApiError) -> dict[str, object]:
    """Return the error's type and message."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    return {"type": _TYPES.get(error.status, usual), "message": error.message}


def error_body(error: ApiError, request_id: str) -> bytes:
    """Return the document that Anthropic's clients read."""
    return orjson.dumps({"type": "error", "error": error_fields(error), "request_id": request_id})
