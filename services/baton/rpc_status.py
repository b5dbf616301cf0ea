"""EndableCall a gRPC call with a status, so that nothing is left of it.

``context.abort`` raises an exception that the call keeps. Its traceback holds every frame of the handler, and
they hold the request, the call and the exception: a cycle, which stays with all that was sent until the
garbage collector comes. A handler that sets the status and returns leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Metadata: TypeAlias = tuple[tuple[str, str], ...]


class EndableCall(Protocol):
    """What a call's context has for its end, whatever messages the call is of."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None: ...


def end_with(
    context: EndableCall, code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str]] = ()
) -> None:
    """Let the call end with ``code`` and trailing ``metadata`` as soon as its handler returns, which it must
    do next; whatever it returns is not sent."""
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(tuple(metadata))
