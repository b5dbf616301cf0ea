"""Bounds on the number of values in the JSON of a body: each is an object of its own once it is decoded, of
up to thirty times its bytes."""

from __future__ import annotations

import re

from baton.router.api.errors import RequestError, invalid

MAX_CONTAINERS = 1 << 18
"""The most lists and objects in a body: each takes 88 bytes, and as many again while it is checked against
its types. The largest conversation that is allowed has some 40,000."""
MAX_STRINGS = 1 << 20
"""The most strings in a body, names of fields included: each takes 72 bytes."""

_QUOTE = ord('"')
_STRING_OR_CONTAINER = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)


def check_values(body: bytes) -> None:
    """Raise RequestError for a body with more lists, objects or strings than allowed. ``body`` need not be
    JSON."""
    # As a rule this check is enough, and takes a millisecond for a megabyte: no text is that full of
    # brackets.
    containers = body.count(b"[") + body.count(b"{")
    if containers <= MAX_CONTAINERS and body.count(b'"') <= 2 * MAX_STRINGS:
        return
    containers = strings = 0
    for found in _STRING_OR_CONTAINER.finditer(body):
        if body[found.start()] == _QUOTE:
            strings += 1
            if strings > MAX_STRINGS:
                raise _too_many(MAX_STRINGS, "strings")
        else:
            containers += 1
            if containers > MAX_CONTAINERS:
                raise _too_many(MAX_CONTAINERS, "lists and objects")


def _too_many(most: int, what: str) -> RequestError:
    return invalid(
        None, f"The body has more than {most} {what}; so many are allowed at most.", "request_too_complex"
    )
