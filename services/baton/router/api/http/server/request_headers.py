"""The headers of a request, as they came."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header called ``name``, which is in lower case; None if there is none.

    Starlette's own look-up raises an error and catches it for each header that is missing, as most are.
    """
    for each, value in scope["headers"]:
        if each == name:
            text: str = value.decode("latin-1")
            return text
    return None
