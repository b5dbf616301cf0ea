"""The way in for data connections: a TCP socket on which a peer shows the token that decode gave it.

Every connector that needs a socket of its own admits peers here, so that a stranger gets nothing but a closed
connection, whatever transport lies behind. Under TLS both sides prove who they are before the token is shown,
and the one who is called says that it is welcome: whoever has called knows then that it was let in. A door
that has certificates hears nobody who comes without.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NoReturn

from baton import sockets
from baton.connector.stream import PlainStream, Stream, TlsStream
from baton.connector.transport import TransferError
from baton.options import parse_address
from baton.supervision import Supervision
from baton.tls.session import DataTls, TlsSession

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
HANDSHAKE_S = 5.0
MOST_GREETINGS = 256
"""At a time. A peer says its token at once: when more come, whoever has been silent longest is sent away."""
_WELCOME = b"+"
_GREETING_BYTES = 16 << 10
"""What is read at a time of whoever has shown no token."""
_LEAST_S = 0.001
"""0 would be for ever."""
_TLS_HELLO = b"\x16\x03"
_IDLE_S, _PROBE_S, _PROBES = 10, 2, 3
"""TCP keepalive: a link idle for hours outlives the idle timers of what lies between."""
_ACCEPT_PAUSE_S = 0.1


class Door:
    """Listens, and calls ``admitted(token, stream)`` for each peer that shows one of the ``expected`` tokens.
    Whoever is called takes the token out of them: it admits one peer, once. The stream's socket does not
    block yet. With ``tls``, nobody is heard without."""

    def __init__(
        self,
        magic: bytes,
        expected: Collection[bytes],
        admitted: Callable[[bytes, Stream], None],
        tls: DataTls | None = None,
    ) -> None:
        self._magic = magic
        self._expected = expected
        self._admitted = admitted
        self._tls = tls
        self._proving = ThreadPoolExecutor(1, thread_name_prefix="door-tls")
        """Computes what TLS wants of a greeting, a millisecond each, beside the event loop. It waits for
        nobody."""
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._greetings: dict[asyncio.Task[None], None] = {}
        """The oldest first."""

    def open(self, host: str, port: int) -> str:
        """Returns host:port. Raises OSError."""
        listener = sockets.listen(host, port)
        listener.setblocking(False)
        self._listener = listener
        self._accepting = Supervision().start("data connections", partial(self._accept, listener))
        return sockets.own_address(listener)

    async def _accept(self, listener: socket.socket) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or the peer has gone again
                log.warning("could not accept a data connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._greetings) >= MOST_GREETINGS:
                oldest = next(iter(self._greetings))
                del self._greetings[oldest]
                oldest.cancel("too many come at once")
            task = asyncio.create_task(self._greet(sock))
            self._greetings[task] = None
            task.add_done_callback(partial(self._greeted, sock))

    def _greeted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._greetings.pop(task, None)
        if task.cancelled():  # it may not even have begun
            sock.close()

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                # No thread waits for strangers: they could take up all there are.
                session = None if self._tls is None else await self._proven(sock, self._tls)
                greeting = await _received(sock, session, len(self._magic) + TOKEN_BYTES)
            token = self._token(greeting)
            if session is not None:
                session.write(_WELCOME)
                sock.send(session.take())  # nothing lies in its buffer
            keep_alive(sock)
        except (OSError, TransferError) as error:
            log.warning(
                "a data connection was refused: %s", str(error) or f"it took more than {HANDSHAKE_S:g} s"
            )
            sock.close()
            return
        self._admitted(token, PlainStream(sock) if session is None else TlsStream(sock, session))

    async def _proven(self, sock: socket.socket, tls: DataTls) -> TlsSession:
        """TLS up to where either side has proved who it is. Raises OSError and TransferError."""
        loop = asyncio.get_running_loop()
        session = tls.called()
        through, first = False, True
        while not through:
            received = await loop.sock_recv(sock, _GREETING_BYTES)
            if not received:
                raise TransferError("it closed the connection before TLS had begun")
            if first and received.startswith(self._magic[:6]):
                raise TransferError("it speaks no TLS: does its worker have --worker-tls-certfile?")
            first = False
            session.feed(received)
            try:
                through = await loop.run_in_executor(self._proving, session.greet)
            finally:  # of an error, the peer is told
                if answer := session.take():
                    await loop.sock_sendall(sock, answer)
        return session

    def _token(self, greeting: bytes) -> bytes:
        """Whom a greeting admits. Raises TransferError: nobody."""
        if greeting.startswith(_TLS_HELLO) and self._tls is None:
            raise TransferError("it speaks TLS, and this worker has no --worker-tls-certfile")
        token = greeting[len(self._magic) :]
        known = next((t for t in self._expected if hmac.compare_digest(t, token)), None)
        if known is None or not greeting.startswith(self._magic):
            raise TransferError("it showed no valid token")
        return known

    async def close(self) -> None:
        tasks = [*self._greetings, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._proving.shutdown(cancel_futures=True)
        if self._listener is not None:
            self._listener.close()


async def dial(address: str, magic: bytes, token: bytes, tls: DataTls | None = None) -> Stream:
    """Connect to a door and show a token. The stream's socket does not block yet. Under TLS, the token was
    taken when this returns. Raises OSError and TransferError, and ValueError for what is no address."""
    host, port = parse_address(address)
    session = None if tls is None else tls.calling(host)
    return await asyncio.to_thread(_dial, host, port, magic + token, session)


def _dial(host: str, port: int, greeting: bytes, session: TlsSession | None) -> Stream:
    sock = sockets.dial(host, port, HANDSHAKE_S)
    try:
        keep_alive(sock)
        if session is None:
            sock.sendall(greeting)  # fits into the buffer of a new socket
        else:
            _introduce(sock, session, greeting)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return PlainStream(sock) if session is None else TlsStream(sock, session)


def _introduce(sock: socket.socket, session: TlsSession, greeting: bytes) -> None:
    """The caller's side of a greeting under TLS."""
    until = time.monotonic() + HANDSHAKE_S
    try:
        while not session.greet():
            _exchange(sock, session, until)
        session.write(greeting)
        while (said := session.read(len(_WELCOME))) is None:
            _exchange(sock, session, until)
    except ssl.SSLError as error:
        with suppress(OSError):  # it has gone; otherwise it is told why
            sock.sendall(session.take())
        raise TransferError(f"no TLS with the data port: {error}") from error
    if said != _WELCOME:
        raise TransferError("the data port did not take the token")


def _exchange(sock: socket.socket, session: TlsSession, until: float) -> None:
    sock.settimeout(max(_LEAST_S, until - time.monotonic()))
    received = b""
    with suppress(ConnectionError):  # as if it had closed in order
        sock.sendall(session.take())
        received = sock.recv(_GREETING_BYTES)
    if not received:
        raise TransferError("the data port ended the greeting: does its worker have --worker-tls-certfile?")
    session.feed(received)


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


async def _received(sock: socket.socket, session: TlsSession | None, size: int) -> bytes:
    """As ``receive_exactly``, under TLS if there is any."""
    if session is None:
        return await receive_exactly(sock, size)
    received = b""
    while len(received) < size:
        piece = session.read(size - len(received))
        if piece is None:
            arrived = await asyncio.get_running_loop().sock_recv(sock, _GREETING_BYTES)
            if not arrived:
                raise TransferError("the peer closed the connection")
            session.feed(arrived)
        elif not piece:
            raise TransferError("the peer closed the connection")
        else:
            received += piece
    return received


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
