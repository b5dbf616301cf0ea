"""Errors as clients see them, whatever protocol they speak."""

from __future__ import annotations

import logging

import orjson

from baton.router.types import DEADLINE_EXCEEDED, RingError

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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status == 429:
            return "rate_limit_error"
        if self.code == DEADLINE_EXCEEDED:
            return DEADLINE_EXCEEDED
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """The JSON document that OpenAI's clients read."""
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


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A request that can never work as it is."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """What a client is told of ``error``. An unexpected one is logged in full and told in one sentence."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RingError):
        return ApiError(error.status, str(error), code=error.code)
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, INTERNAL_MESSAGE, code="internal_error")


def shown(value: object, limit: int = 60) -> str:
    """A client's value as JSON for an error message, cut where it is long."""
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError):  # integers over 64 bits, for one
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
