"""Errors as HTTP responses, all in OpenAI's shape."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.router.api.errors import ApiError, RequestError, as_api_error
from baton.router.api.http.disconnect import ClientGoneError
from baton.router.types import RingError

CLIENT_CLOSED_REQUEST = 499

_LINGER_SECONDS = 2.0


class RefusedBody(Response):
    """An answer to a body that is not wanted.

    After answering it reads on and discards for a moment: closing at once would reset the connection of a
    client that is still sending, and it would never see the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while (await receive()).get("more_body"):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: ApiError, retry_after_seconds: int) -> Response:
    """``error`` as a response; a client that may try again is told when."""
    headers = dict(error.headers)
    # What is too large for a limit is so for ever.
    if error.status in (429, 503) and error.code != "request_too_large":
        headers.setdefault("retry-after", str(retry_after_seconds))
    if error.status == 413:
        headers["connection"] = "close"
        return RefusedBody(error.body(), 413, headers, "application/json")
    return Response(error.body(), error.status, headers, "application/json")


def add_error_handlers(app: FastAPI, retry_after_seconds: int) -> None:
    """Let ``app`` answer its expected errors; what is unexpected is left to the request envelope."""

    async def api_error(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error, request.scope["state"]["request_id"]), retry_after_seconds)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_routing_error(request, error), retry_after_seconds)
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
