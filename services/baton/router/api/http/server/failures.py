"""Errors as HTTP responses, in the shape of the path's protocol."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.router.api.errors import ApiError, RequestError, as_api_error
from baton.router.api.http.server import anthropic_errors as anthropic
from baton.router.api.http.server.disconnect import ClientGoneError
from baton.router.dispatch.types import RingError

CLIENT_CLOSED_REQUEST = 499

_LINGER_SECONDS, _SILENT_SECONDS = 30.0, 2.0


class RefusedBodyResponse(Response):
    """An answer to a body that is not wanted.

    After the answer it reads on and discards as long as the client goes on sending, 30 seconds at most:
    closing at once would reset the connection, and a client that is still sending would never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while (await asyncio.wait_for(receive(), _SILENT_SECONDS)).get("more_body"):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: ApiError, scope: Scope, retry_after_seconds: int) -> Response:
    """Return ``error`` as a response to the request of ``scope``, with whether and when to try again."""
    headers = dict(error.headers)
    headers["x-should-retry"] = "true" if _passes(error) else "false"
    if error.status in (429, 503) and _passes(error):
        headers.setdefault("retry-after", str(retry_after_seconds))
    status, body = error.status, error.body
    if anthropic.is_at(scope["path"]):
        status = anthropic.status_of(error)
        body = partial(anthropic.error_body, error, scope["state"]["request_id"])
    if status == 413:
        headers["connection"] = "close"
        return RefusedBodyResponse(body(), 413, headers, "application/json")
    return Response(body(), status, headers, "application/json")


def _passes(error: ApiError) -> bool:
    """Whether the same request may succeed later. A request that is too large for a limit stays so, and one
    that has broken something must not come back."""
    return error.status in (429, 502, 503) and error.code != "request_too_large"


def add_error_handlers(app: FastAPI, retry_after_seconds: int) -> None:
    """Let ``app`` answer its expected errors; unexpected ones are left to the request envelope."""

    async def api_error(request: Request, error: Exception) -> Response:
        answer = as_api_error(error, request.scope["state"]["request_id"])
        return error_response(answer, request.scope, retry_after_seconds)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_routing_error(request, error), request.scope, retry_after_seconds)
        response.headers.update(error.headers or {})
        return response

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestError, api_error)
    app.add_exception_handler(RingError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGoneError, client_gone)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    path = request.url.path[:200]
    if error.status_code == 404:
        return ApiError(404, f"There is nothing at {path}.", code="not_found")
    if error.status_code == 405:
        return ApiError(405, f"{request.method} is not allowed at {path}.", code="method_not_allowed")
    return ApiError(error.status_code, error.detail)
