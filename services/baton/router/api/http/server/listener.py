"""The accepting of HTTP connections: one at a time, and each with a slot."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import TypeAlias

from baton.router.api.errors import ApiError
from baton.router.api.http.server.connection import HEAD_S, Connection
from baton.router.api.http.server.slots import ConnectionSlots, Slot

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
"""The most connections that are accepted in one turn of the event loop. Connections that give way close in
the next turn: their descriptors must be fewer than are set aside."""
MAX_TOLD = 16
"""The most connections that are being answered that there are too many; others are closed without an
answer."""
PAUSE_S = 0.1
"""The pause in accepting if the system has no resources left for a connection, in seconds."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

MakeConnection: TypeAlias = Callable[[Slot, ApiError | None], Connection]
"""Makes a connection for a slot; with an error, the error is the only answer that the client gets."""


class HttpListener:
    """Accepts from a socket that listens, until it is closed. The caller closes the socket."""

    def __init__(
        self,
        listening: socket.socket,
        slots: ConnectionSlots,
        make: MakeConnection,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._socket = listening
        self._slots = slots
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._told = 0
        self._again: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accept no more. Unfinished handshakes end."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket)
        for task in self._opening:
            task.cancel()

    def _start(self) -> None:
        self._again = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    log.debug("a connection cannot be accepted: %s", error)
                    return
                # The socket stays readable: without a pause, it would take the event loop's whole time.
                self._slots.make_room()
                self._loop.remove_reader(self._socket)
                self._again = self._loop.call_later(PAUSE_S, self._start)
                return
            self._take(accepted, str(address[0]) if address else "")

    def _take(self, accepted: socket.socket, address: str) -> None:
        accepted.setblocking(False)
        refusal = None
        try:
            slot = self._slots.take(address)
        except ApiError as error:
            if self._told >= MAX_TOLD:
                accepted.close()
                return
            refusal = error
            slot = self._slots.outside(self._untold)
            self._told += 1
        task = self._loop.create_task(self._open(accepted, slot, self._make(slot, refusal)))
        slot.close = task.cancel
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _untold(self) -> None:
        self._told -= 1

    async def _open(self, accepted: socket.socket, slot: Slot, connection: Connection) -> None:
        """Wait until the connection is open, or its TLS handshake has failed or taken too long."""
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HEAD_S,
            )
        except (OSError, TimeoutError) as error:  # an SSLError is an OSError
            self._slots.metrics.refused.labels("tls").inc()
            log.debug("%s: no TLS connection: %s", accepted, error)
            connection.never_made()
        except asyncio.CancelledError:
            connection.never_made()
            raise
