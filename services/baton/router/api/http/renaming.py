"""Errors of a chat by the names that another protocol has for its fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.router.api.errors import RequestError

Names = Sequence[tuple[str, str]]
"""The beginnings of fields, as regular expressions, and what they are called elsewhere; the first that
matches counts."""


@contextmanager
def renaming(names: Names) -> Iterator[None]:
    """Tell errors that are raised inside by other ``names``."""
    try:
        yield
    except RequestError as error:
        raise _renamed(error, names) from None


def _renamed(error: RequestError, names: Names) -> RequestError:
    if error.param is None:
        return error
    for ours, theirs in names:
        param, count = re.subn(rf"^{ours}(?![A-Za-z_])", theirs, error.param, count=1)
        if count:
            return RequestError(error.message.replace(error.param, param), param=param, code=error.code)
    return error


def message_names(places: Sequence[str]) -> list[tuple[str, str]]:
    """The names of a chat's messages, by where each came from."""
    return [(rf"messages\[{index}\]", place) for index, place in enumerate(places)]
