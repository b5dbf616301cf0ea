"""The answers to input that never becomes a request, made without the application."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from baton.router.api.errors import ApiError
from baton.router.api.http.server.envelope import id_headers
from baton.router.api.http.server.failures import error_response

RETRY_AFTER_S = 1


class Refusal(NamedTuple):
    """Why a connection is read no further: the error for its client, and the ``reason`` for the metrics."""

    reason: str
    error: ApiError


def answer_of(error: ApiError, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a connection's last answer, whole, with ``headers``: ``error`` in the shape of ``path``."""
    minted = uuid.uuid4().hex
    scope = {"type": "http", "path": path, "headers": [], "state": {"request_id": minted}}
    response = error_response(error, scope, RETRY_AFTER_S)
    lines = [STATUS_LINE[response.status_code]]
    for name, value in (
        *headers,
        *response.raw_headers,
        *id_headers(scope, minted),
        (b"connection", b"close"),
    ):
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join([*lines, b"\r\n", bytes(response.body)])
