"""The HTTP server of a router: uvicorn's, with its own bounds on connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import NoReturn

import uvicorn

from baton.router.api.errors import ApiError
from baton.router.api.http.server.connection import Connection
from baton.router.api.http.server.listener import HttpListener
from baton.router.api.http.server.slots import ConnectionSlots, Slot
from baton.telemetry.supervision import Supervision

LOOK_S = 1.0
"""The time between two looks for connections that take too long, in seconds."""


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
        """Accept no more, let open answers end, and close."""
        for listener in self._listeners:
            listener.close()
        try:
            await super().shutdown(sockets)
        finally:
            if self._looking is not None:
                self._looking.cancel()

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
