"""Errors of the API as gRPC statuses."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import grpc

from baton.net import rpc_status
from baton.net.rpc_status import end_with
from baton.router.api.errors import ApiError

_CODES = MappingProxyType(
    {
        400: grpc.StatusCode.INVALID_ARGUMENT,
        401: grpc.StatusCode.UNAUTHENTICATED,
        403: grpc.StatusCode.PERMISSION_DENIED,
        404: grpc.StatusCode.NOT_FOUND,
        408: grpc.StatusCode.DEADLINE_EXCEEDED,
        409: grpc.StatusCode.ABORTED,
        413: grpc.StatusCode.INVALID_ARGUMENT,
        429: grpc.StatusCode.RESOURCE_EXHAUSTED,
        501: grpc.StatusCode.UNIMPLEMENTED,
        502: grpc.StatusCode.UNAVAILABLE,
        503: grpc.StatusCode.UNAVAILABLE,
        504: grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)


class Ending(NamedTuple):
    """The status of a failed call: what is told of the error, without the error itself, whose traceback would
    keep the request."""

    status: int
    """The HTTP status of the same error."""
    details: str
    metadata: tuple[tuple[str, str], ...]
    """Trailing metadata: the error's code and field, and what HTTP has as headers."""

    @classmethod
    def of(cls, error: ApiError) -> Ending:
        pairs = (("baton-error-code", error.code), ("baton-error-param", error.param), *error.headers.items())
        # Metadata is ASCII; a field's name comes from the client.
        metadata = tuple((key, value.encode("ascii", "replace").decode()) for key, value in pairs if value)
        return cls(error.status, error.message, metadata)

    def end(self, context: rpc_status.EndableCall) -> None:
        """Let the call end with this status as soon as its handler returns."""
        code = _CODES.get(self.status, grpc.StatusCode.INTERNAL)
        end_with(context, code, self.details, self.metadata)
