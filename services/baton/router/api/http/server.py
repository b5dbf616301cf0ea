"""The HTTP server of a router: uvicorn's, with bounds of its own at the door."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import NoReturn

import uvicorn

from baton.router.api.errors import ApiError
from baton.router.api.http.connection import Connection
from baton.router.api.http.listener import HttpListener
from baton.router.api.http.slots import ConnectionSlots, Slot
from baton.supervision import Supervision

LOOK_S = 1.0
"""Between two looks at what takes too long."""


class HttpServer(uvicorn.Server):
    """Serves on sockets that listen, as many connections as there are slots."""

    def __init__(self, config: uvicorn.Config, slots: ConnectionSlots, tasks: Supervision) -> None:
        super().__init__(config)
        self._tasks = tasks
        self._slots = slots
        self._listeners: list[HttpListener] = []
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the router's. Heard by both, the first one would be two, and end what is under way."""
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
