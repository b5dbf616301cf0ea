"""The listener for data connections: a TCP socket on which a peer shows the token that decode gave it.

Every connector that needs a socket of its own admits peers here, so that a stranger gets nothing but a closed
connection, whatever the transport. Under TLS both sides prove who they are before the token is shown, and the
listener answers that the token is accepted, so the peer knows that it was let in. A listener that has
certificates does not hear a peer that comes without TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NoReturn
from weakref import WeakValueDictionary

from baton.net import sockets
from baton.net.rare_log import RareLog
from baton.net.tls_session import DataTls, TlsSession
from baton.process.options import parse_address
from baton.telemetry.supervision import Supervision
from baton.transport.base import TransferError
from baton.transport.stream import PlainStream, Stream, TlsStream

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
HANDSHAKE_S = 5.0
MAX_GREETINGS = 256
"""Most greetings at a time. A peer says its token at once: when more come, the oldest greeting of the address
that has most of them is broken off."""
MAX_FROM_ONE = 64
"""Most greetings from one address at a time; when more come, its oldest is broken off. A host has a
connection for each rank of its workers."""
_WELCOME = b"+"
_GREETING_BYTES = 16 << 10
"""Most bytes read at a time from a peer that has shown no token."""
_MIN_S = 0.001
"""The shortest timeout, in seconds: 0 would be for ever."""
_TLS_HELLO = b"\x16\x03"
_IDLE_S, _PROBE_S, _PROBES = 10, 2, 3
"""TCP keepalive: a link that is idle for hours outlives the idle timers of the network between."""
_ACCEPT_PAUSE_S = 0.1


class DataListener:
    """Listens, and calls ``admitted(token, stream)`` for each peer that shows one of the ``expected`` tokens.
    The callee removes the token from ``expected``: a token admits one peer, once. The stream's socket does
    not block yet. With ``tls``, a peer without TLS is not heard."""

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
        self._handshakes = _Handshakes()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._greetings: dict[asyncio.Task[None], str] = {}
        """The running greetings, the oldest first, and the addresses that they come from."""
        self.refused = 0
        """The number of connections refused so far."""
        self._rare = RareLog(log, "connections")

    def open(self, host: str, port: int) -> str:
        """Listen. Returns host:port. Raises OSError."""
        listener = sockets.listen(host, port)
        listener.setblocking(False)
        self._listener = listener
        self._accepting = Supervision().start("data connections", partial(self._accept, listener))
        return sockets.own_address(listener)

    async def _accept(self, listener: socket.socket) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or the peer has gone again
                log.warning("could not accept a data connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._make_room(host)
            task = asyncio.create_task(self._greet(sock, host))
            self._greetings[task] = host
            task.add_done_callback(partial(self._greeted, sock))

    def _make_room(self, host: str) -> None:
        """Break one greeting off if there are as many as are allowed, in all or from this address."""
        taken = Counter(self._greetings.values())
        if taken[host] >= MAX_FROM_ONE:
            full = host
        elif len(self._greetings) >= MAX_GREETINGS:
            [(full, _)] = taken.most_common(1)
        else:
            return
        oldest = next(task for task, address in self._greetings.items() if address == full)
        del self._greetings[oldest]
        oldest.cancel("too many come at once")

    def _greeted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._greetings.pop(task, None)
        if task.cancelled():  # the task may not even have begun
            sock.close()

    async def _greet(self, sock: socket.socket, host: str) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                # No thread waits for strangers: they could take up every thread.
                session = None if self._tls is None else await self._proven(sock, host, self._tls)
                greeting = await _received(sock, session, len(self._magic) + TOKEN_BYTES)
            token = self._token(greeting)
            if session is not None:
                session.write(_WELCOME)
                sock.send(session.take())  # the socket's send buffer is empty
            keep_alive(sock)
        except (OSError, TransferError) as error:
            self.refused += 1
            why = str(error) or f"it took more than {HANDSHAKE_S:g} s"
            self._rare.warn("a data connection from %s was refused: %s", host, why)
            sock.close()
            return
        self._admitted(token, PlainStream(sock) if session is None else TlsStream(sock, session))

    async def _proven(self, sock: socket.socket, host: str, tls: DataTls) -> TlsSession:
        """Do the TLS handshake, up to where both sides have proved who they are. Raises OSError and
        TransferError."""
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
                through = await self._handshakes.advance(session, host)
            finally:  # the peer is told of an error, too
                if answer := session.take():
                    await loop.sock_sendall(sock, answer)
        return session

    def _token(self, greeting: bytes) -> bytes:
        """Return the token that a greeting shows, if it admits a peer. Raises TransferError if it admits
        none."""
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
        self._handshakes.close()
        if self._listener is not None:
            self._listener.close()


class _Handshakes:
    """Computes TLS handshakes, a millisecond for each step, on a thread beside the event loop, which never
    waits for a peer. The steps of one address are computed one after the other, so that however many
    greetings come from there, those of another address wait for one step of each address alone."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="door-tls")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The turns of the addresses that have greetings under way."""

    async def advance(self, session: TlsSession, host: str) -> bool:
        """Do a step of a session's handshake, as ``TlsSession.greet`` does."""
        turn = self._turns.setdefault(host, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, session.greet)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


async def dial(address: str, magic: bytes, token: bytes, tls: DataTls | None = None) -> Stream:
    """Connect to a listener and show a token. The stream's socket does not block yet. Under TLS, the listener
    has accepted the token when this returns. Raises OSError and TransferError, and ValueError for what is no
    address."""
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
    """Do the caller's side of a greeting under TLS."""
    until = time.monotonic() + HANDSHAKE_S
    try:
        while not session.greet():
            _exchange(sock, session, until)
        session.write(greeting)
        while (said := session.read(len(_WELCOME))) is None:
            _exchange(sock, session, until)
    except ssl.SSLError as error:
        with suppress(OSError):  # the peer has gone; otherwise it is told why
            sock.sendall(session.take())
        raise TransferError(f"no TLS with the data port: {error}") from error
    if said != _WELCOME:
        raise TransferError("the data port did not take the token")


def _exchange(sock: socket.socket, session: TlsSession, until: float) -> None:
    sock.settimeout(max(_MIN_S, until - time.monotonic()))
    received = b""
    with suppress(ConnectionError):  # treated as a close in order
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
    """Receive exactly ``size`` bytes as ``receive_exactly`` does, decrypted if there is a TLS session."""
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
    """Receive ``size`` bytes from a socket that does not block. Raises TransferError when the peer closes it
    before."""
    received = bytearray(size)
    rest = memoryview(received)
    while rest.nbytes:
        count = await asyncio.get_running_loop().sock_recv_into(sock, rest)
        if count == 0:
            raise TransferError("the peer closed the connection")
        rest = rest[count:]
    return bytes(received)


class Watch:
    """Tells once when the peer of a socket on which nothing more is sent has gone, even if it was killed.

    A transport with a liveness check of its own may take tens of seconds to find a dead peer; the kernel
    closes the sockets of a dead process at once.
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
