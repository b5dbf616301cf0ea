"""The errors of a request."""

from __future__ import annotations

import orjson


class RequestError(ValueError):
    """A request that can never work as it is. ``param`` is the field at fault, ``code`` a word for programs.

    The message names the field, its value and what is allowed.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def invalid(param: str | None, message: str, code: str = "invalid_value") -> RequestError:
    """Return the error of one field."""
    return RequestError(message, param=param, code=code)


def in_short(text: str, limit: int = 500) -> str:
    """Return another library's message about a client's value, which it may quote whole, cut where it is
    long."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: object, limit: int = 60) -> str:
    """Return a client's value as JSON for an error message, cut where it is long."""
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError):  # such as integers over 64 bits
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
