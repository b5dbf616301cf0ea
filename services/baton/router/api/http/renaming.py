"""Errors of a chat by the names that another protocol has for its fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.router.api.errors import ApiError, RequestError

Names = Sequence[tuple[str, str]]
"""The beginnings of fields, as regular expressions, and what they are called elsewhere; the first that
matches counts."""


@contextmanager
def renaming(names: Names) -> Iterator[None]:
    """Tell errors that are raised inside by other ``names``."""
    try:
        yield
    except RequestError as error:
        param = _renamed(error.param, names)
        if error.param is None or param is None:
            raise
        message = error.message.replace(error.param, param)
        raise RequestError(message, param=param, code=error.code) from None
    except ApiError as error:
        param = _renamed(error.param, names)
        if error.param is None or param is None:
            raise
        message = error.message.replace(error.param, param)
        raise ApiError(error.status, message, param=param, code=error.code, headers=error.headers) from None


def _renamed(param: str | None, names: Names) -> str | None:
    """None: it has no other name."""
    for ours, theirs in names:
        renamed, count = re.subn(rf"^{ours}(?![A-Za-z_])", theirs, param or "", count=1)
        if count:
            return renamed
    return None


def message_names(places: Sequence[str]) -> list[tuple[str, str]]:
    """The names of a chat's messages, by where each came from."""
    return [(rf"messages\[{index}\]", place) for index, place in enumerate(places)]
