"""The way in for data connections: a TCP socket on which a peer shows the token that decode gave it.

Every connector that needs a socket of its own admits peers here, so that a stranger gets nothing but a closed
connection, whatever transport lies behind.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

from baton.connector.transport import TransferError
from baton.supervision import Supervision

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
HANDSHAKE_S = 5.0
_IDLE_S, _PROBE_S, _PROBES = 10, 2, 3
"""TCP keepalive: a link idle for hours outlives the idle timers of what lies between."""
_ACCEPT_PAUSE_S = 0.1


class Door:
    """Listens, and calls ``admitted(token, socket)`` for each peer that shows one of the ``expected`` tokens.
    Whoever is called takes the token out of them: it admits one peer, once."""

    def __init__(
        self, magic: bytes, expected: Collection[bytes], admitted: Callable[[bytes, socket.socket], None]
    ) -> None:
        self._magic = magic
        self._expected = expected
        self._admitted = admitted
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._greetings: set[asyncio.Task[None]] = set()

    def open(self, host: str, port: int) -> str:
        listener = socket.create_server((host, port), backlog=128)
        listener.setblocking(False)
        self._listener = listener
        self._accepting = Supervision().start("data connections", partial(self._accept, listener))
        bound_host, bound_port = listener.getsockname()[:2]
        return f"{bound_host}:{bound_port}"

    async def _accept(self, listener: socket.socket) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or the peer has gone again
                log.warning("could not accept a data connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._greet(sock))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                # No thread waits for strangers: they could take up all there are.
                greeting = await receive_exactly(sock, len(self._magic) + TOKEN_BYTES)
        except (OSError, TransferError) as error:
            log.warning("a data connection did not introduce itself: %s", error or "too slow")
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        token = greeting[len(self._magic) :]
        known = next((t for t in self._expected if hmac.compare_digest(t, token)), None)
        if known is None or not greeting.startswith(self._magic):
            log.warning("a data connection showed no valid token")
            sock.close()
            return
        keep_alive(sock)
        self._admitted(known, sock)

    async def close(self) -> None:
        tasks = [*self._greetings, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()


async def dial(address: str, magic: bytes, token: bytes) -> socket.socket:
    """Connect to a door and show a token. The socket does not block."""
    host, _, port = address.rpartition(":")
    sock = await asyncio.to_thread(socket.create_connection, (host, int(port)), HANDSHAKE_S)
    try:
        keep_alive(sock)
        sock.sendall(magic + token)  # fits into the buffer of a new socket
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


async def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """From a socket that does not block. Raises TransferError when the peer closes it before."""
    received = bytearray(size)
    rest = memoryview(received)
    while rest.nbytes:
        count = await asyncio.get_running_loop().sock_recv_into(sock, rest)
        if count == 0:
            raise TransferError("the peer closed the connection")
        rest = rest[count:]
    return bytes(received)


class Watch:
    """Tells once when the peer of a socket on which nothing more is said has gone, be it killed.

    A transport with its own idea of liveness may take tens of seconds to find a dead peer; the kernel closes
    the sockets of a dead process at once.
    """

    def __init__(self, sock: socket.socket, on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = sock
        self._on_end = on_end
        self._loop.add_reader(sock, self._readable)

    def _readable(self) -> None:
        self.close()
        self._on_end()

    def close(self) -> None:
        """Stop watching and close the socket, which the peer's watch notices."""
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.remove_reader(sock)
            sock.close()
