"""The HTTP server of a router: uvicorn's, with its own bounds on connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import NoReturn

import uvicorn

from baton.router.api.errors import ApiError
from baton.router.api.http.server.connection import Connection
from baton.router.api.http.server.listener import HttpListener
from baton.router.api.http.server.slots import ConnectionSlots, Slot
from baton.telemetry.supervision import Supervision

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""The time between two looks for connections that take too long, in seconds."""
END_LOOK_S = 0.01
"""The time between two looks for what is open still at the end, in seconds."""


class HttpServer(uvicorn.Server):
    """Serves on sockets that listen, with as many connections as there are slots."""

    def __init__(self, config: uvicorn.Config, slots: ConnectionSlots, tasks: Supervision) -> None:
        super().__init__(config)
        self._tasks = tasks
        self._slots = slots
        self._listeners: list[HttpListener] = []
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the router. If the server handled them too, the first one would count as two, and
        end the answers under way."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from ``sockets``."""
        assert sockets is not None
        await self.lifespan.startup()
        self.servers = []
        self._listeners = [
            HttpListener(each, self._slots, self._connection, self.config.ssl) for each in sockets
        ]
        self._looking = self._tasks.start("connections", self._look)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, let open answers end, and close. ``force_exit``, or the configuration's
        ``timeout_graceful_shutdown``, ends the wait for them."""
        for listener in (*self._listeners, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._answered()
        except TimeoutError:
            log.error("the time to drain is over: %d open requests are cut", len(self.server_state.tasks))
            for task in self.server_state.tasks:
                task.cancel()
        finally:
            if not self.force_exit:
                await self.lifespan.shutdown()
            if self._looking is not None:
                self._looking.cancel()

    async def _answered(self) -> None:
        """Wait until connections are closed and requests are answered, as uvicorn does, which first lets a
        tenth of a second pass."""
        state = self.server_state
        await asyncio.sleep(0)  # idle connections close in the next turn
        while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110 - uvicorn tells of no event
            await asyncio.sleep(END_LOOK_S)

    def _connection(self, slot: Slot, refusal: ApiError | None) -> Connection:
        return Connection(
            self.config,
            self.server_state,
            self.lifespan.state,
            asyncio.get_running_loop(),
            slot=slot,
            metrics=self._slots.metrics,
            refusal=refusal,
        )

    async def _look(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            now = loop.time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.look(now)
