"""Ending a gRPC call with a status, without a reference cycle.

``context.abort`` raises an exception that the call keeps. The exception's traceback holds every frame of the
handler, and the frames hold the request, the call and the exception: a cycle, which keeps the request's
memory until Python's cycle collector runs. A handler that sets the status and returns makes no cycle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Metadata: TypeAlias = tuple[tuple[str, str], ...]


class EndableCall(Protocol):
    """The part of a call's context that ends the call, for any type of message."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None: ...


def end_with(
    context: EndableCall, code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str]] = ()
) -> None:
    """Have the call end with ``code`` and trailing ``metadata`` when its handler returns. The handler must
    return next; its return value is not sent."""
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(tuple(metadata))
