"""Errors as clients see them, whatever their protocol."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import orjson

from baton.request.errors import RequestError, in_short, invalid, shown
from baton.router.dispatch.types import DEADLINE_EXCEEDED, RingError

__all__ = ["ApiError", "RequestError", "as_api_error", "in_short", "invalid", "shown"]

log = logging.getLogger(__name__)

INTERNAL_MESSAGE = "The server had an error while processing your request."


class ApiError(Exception):
    """A request that ends with an error. ``status`` is the HTTP status; ``param`` the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``headers`` go with the answer; over gRPC they are metadata."""
        super().__init__(message)
        self.headers = headers or {}
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """The error's class in OpenAI's API."""
        if self.status == 429:
            return "rate_limit_error"
        if self.code == DEADLINE_EXCEEDED:
            return DEADLINE_EXCEEDED
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """Return the error as the JSON document that OpenAI's clients read."""
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Return what a client is told of ``error``. An unexpected error is logged in full, and its client gets
    one sentence."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, error.message, param=error.param, code=error.code)
    if isinstance(error, RingError):
        return ApiError(error.status, str(error), code=error.code)
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, INTERNAL_MESSAGE, code="internal_error")
