"""Answers as streams of server-sent events, whatever their shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.router.api.http.disconnect import ClientGoneError, ClientWatch
from baton.router.api.service import CompletionService, Job
from baton.text.choice import Delta

Deltas = AsyncGenerator[tuple[int, Delta]]


class Begun(NamedTuple):
    """An answer whose first delta has come: until then, an error still has a status of its own."""

    first: tuple[int, Delta]
    deltas: Deltas
    """Those after the first."""
    headers: Mapping[str, str]


async def begin(service: CompletionService, request: Request, job: Job) -> Begun:
    """Start ``job``. Raises ApiError or RingError, and ClientGoneError when the client leaves first."""
    ticket = service.ticket(job)
    deltas = service.run(job, ticket)
    try:
        async with ClientWatch(request.receive):
            first = await anext(deltas)
    except BaseException:
        await deltas.aclose()
        raise
    return Begun(first, deltas, ticket.headers)


class EventStream(Response):
    """Server-sent events made from the deltas of ``source``.

    Both are closed whatever ends the stream, at once when the client leaves: ``events`` may not even
    have started, so it cannot be the one to close its source.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        source: AsyncGenerator[tuple[int, Delta]],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with ClientWatch(receive):
                await self._send_all(send)
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
