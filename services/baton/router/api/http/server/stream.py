"""Answers as streams of server-sent events, whatever their shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.router.api.http.server.connection import Exchange, exchange_of
from baton.router.api.http.server.disconnect import ClientGoneError, ClientWatch, gone
from baton.router.api.job import Job
from baton.router.api.relay import Relay, SlowClientError
from baton.router.api.service import CompletionService
from baton.text.choice import Delta

Deltas = AsyncGenerator[tuple[int, Delta]]


class Begun(NamedTuple):
    """An answer whose first delta has come: until then, an error still has a status of its own."""

    service: CompletionService
    job: Job
    first: tuple[int, Delta]
    deltas: Deltas
    """The deltas after the first."""
    headers: Mapping[str, str]

    def stream(self, events: AsyncGenerator[bytes]) -> EventStream:
        """Return the response whose ``events`` are made of the deltas."""
        service = self.service
        return EventStream(
            events, self.deltas, self.headers, service.relay(len), partial(service.cut_off, self.job)
        )


async def begin(service: CompletionService, request: Request, job: Job) -> Begun:
    """Start ``job``. Raises ApiError or RingError, and ClientGoneError if the client leaves first."""
    scope = service.scope(job)
    deltas = service.run(job, scope)
    try:
        async with ClientWatch(request.receive):
            first = await anext(deltas)
    except BaseException:
        await deltas.aclose()
        raise
    return Begun(service, job, first, deltas, scope.headers)


class EventStream(Response):
    """Server-sent events made from the deltas of ``source``.

    Both generators are closed whatever ends the stream, at once if the client leaves: ``events`` may not even
    have started, so it cannot be the one to close its source.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        source: AsyncGenerator[tuple[int, Delta]],
        headers: Mapping[str, str],
        relay: Relay[bytes],
        on_slow: Callable[[SlowClientError], None],
    ) -> None:
        """``relay`` takes over once the client does not keep up. ``on_slow`` is called for a client that is
        cut off."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._relay = relay
        self._on_slow = on_slow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own: resuming a task goes through all coroutines that await in it, and under this one
        # there are some twenty layers of servers and middleware, for every token.
        await asyncio.create_task(self._run(scope, receive, send), name="event stream")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        try:
            async with ClientWatch(receive):
                await self._send_all(send, exchange)
        except ClientGoneError:
            pass
        except SlowClientError as error:
            self._on_slow(error)
            if exchange is not None:
                exchange.abort()
                await gone(receive)
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_all(self, send: Send, exchange: Exchange | None) -> None:
        """Send all events. As long as the client keeps up, they go straight out, past ASGI: none waits, and
        none is timed."""

        async def write(events: list[bytes]) -> None:
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._relay.within_patience(send(start))
        async for event in self._events:
            if exchange is None or not exchange.write(event):
                self._relay.add(event)
                await self._relay.run(self._events, write)
                break
        await self._relay.within_patience(
            send({"type": "http.response.body", "body": b"", "more_body": False})
        )
