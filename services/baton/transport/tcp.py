"""The ``tcp`` connector: the standard library only, the default where nothing better is available.

One stream per link (``baton.transport.stream``), plain, or TLS 1.3 where the services have certificates. A
message is a 16-byte header (tag, size) and its bytes, which go from the sender's pages to the stream and from
the stream into the receiver's pages, or by way of ``staging`` where they are not contiguous. Between pages
and a plain socket nothing is copied; under TLS no byte reaches pages before it is proved to be the peer's.
Each end has one thread: a blocking ``recvmsg_into`` or ``sendmsg`` releases the GIL and needs no event loop
turn per packet, and neither the engine nor the control plane waits for it. Once ``close`` has joined the
thread, nothing can touch a page: that is the fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.net.tls_session import DataTls
from baton.transport.base import ConnectorSettings, Link, PageMemory, TransferError
from baton.transport.data_listener import DataListener, dial
from baton.transport.staging import M_co, Staging, StagingRoom, pieces
from baton.transport.stream import Stream

log = logging.getLogger(__name__)

_HEADER = struct.Struct("!QQ")
_MAGIC = b"baton-tcp-1\n"
_DISCARD_BYTES = 1 << 20
_SOCKET_BUFFER_BYTES = 4 << 20
LOOK_S = 0.05
"""The time between two looks at its socket of a thread that waits for something else, in seconds."""
_HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)


@dataclass(slots=True, eq=False)
class Receive:
    blocks: tuple[int, ...]
    done: asyncio.Future[None]


@dataclass(slots=True)
class OutgoingMessage:
    tag: int
    blocks: tuple[int, ...]
    done: asyncio.Future[None]


def settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def wait_for_room(room: StagingRoom[M_co], size: int, freed: threading.Event, sock: socket.socket) -> M_co:
    """Return memory for a piece, once there is room. ``freed`` is the calling thread's own. Raises
    TransferError when the connection ends before."""
    while (piece := room.take(size, freed.set)) is None:
        while not freed.wait(LOOK_S):
            if not connected(sock):
                raise TransferError("the connection has ended")
        freed.clear()
    return piece


class _SocketThread:
    """The state that both ends have: a socket, a thread on it, and a close that waits for the thread."""

    def __init__(
        self,
        memory: PageMemory,
        room: StagingRoom[memoryview],
        on_lost: Callable[[], None],
        on_crash: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._room = room
        self._on_lost = on_lost
        self._on_crash = on_crash
        self._lock = threading.Lock()
        self._closed = False
        self._over = asyncio.Event()
        """The event set when the thread has done all it will ever do."""
        self._room_freed = threading.Event()
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None

    def _start(self, stream: Stream) -> None:
        with self._lock:
            if self._closed:
                stream.sock.close()
                return
            self._stream = stream
            self._thread = threading.Thread(target=self._main, name="kv-" + type(self).__name__, daemon=True)
            self._thread.start()

    def _main(self) -> None:
        assert self._stream is not None
        try:
            self._run(self._stream)
        except (OSError, TransferError) as error:
            if not self._closed:
                log.info("a data connection ended: %s", error)
        except Exception:
            log.exception("a data connection's thread met an error; the worker cannot go on")
            self._post(self._on_crash)
        finally:
            shut_down(self._stream.sock)  # the peer learns it now, not when this end is closed
            self._post(self._ended)

    def _run(self, stream: Stream) -> None:
        raise NotImplementedError

    def _post(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the process is ending
            log.debug("a completion came after the event loop had ended")

    @contextlib.contextmanager
    def _staged(self, sock: socket.socket, size: int) -> Iterator[memoryview]:
        """Lend memory for a piece of ``size`` bytes, once there is room. Runs on the link's thread."""
        piece = wait_for_room(self._room, size, self._room_freed, sock)
        try:
            yield piece
        finally:
            self._room.give_back(piece)

    def _ended(self) -> None:
        lost = not self._closed
        self._over.set()
        self._fail_all(TransferError("the data connection ended"))
        if lost:
            self._on_lost()

    def _fail_all(self, error: TransferError) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            sock, thread = self._stream.sock if self._stream is not None else None, self._thread
        if sock is not None:
            shut_down(sock)
        self._wake()
        if thread is not None:
            # Waiting for the event keeps the loop's executor out of it: others can fill the executor up, and
            # a join that never ends would keep the process from ending, which is all that is left to do then.
            await self._over.wait()
            thread.join()
        if sock is not None:
            sock.close()
        self._fail_all(TransferError("the link was closed"))

    def _wake(self) -> None:
        """Wake a thread that waits for something other than the socket or room, so that it sees that the link
        is over."""


class TcpReceivingLink(_SocketThread):
    """Decode's end: posted receives, filled by the reader thread."""

    def __init__(
        self,
        memory: PageMemory,
        room: StagingRoom[memoryview],
        on_lost: Callable[[], None],
        on_crash: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        super().__init__(memory, room, on_lost, on_crash)
        self._on_closed = on_closed
        self._posted: dict[int, Receive] = {}
        self._matched: list[Receive] = []
        """The receives whose message is arriving."""

    async def close(self) -> None:
        self._on_closed()
        await super().close()

    def attach(self, stream: Stream) -> None:
        """Start the reader thread: the peer has connected and shown its token."""
        self._start(stream)

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        receive = Receive(tuple(blocks), self._loop.create_future())
        with self._lock:
            if self._closed:
                receive.done.set_exception(TransferError("the link is closed"))
            else:
                self._posted[tag] = receive
        return receive.done

    def cancel_receive(self, tag: int) -> bool:
        with self._lock:
            receive = self._posted.pop(tag, None)
        if receive is None:
            return False
        settle(receive.done, TransferError("cancelled before anything arrived"))
        return True

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        raise TransferError("KV blocks travel from prefill to decode only")

    def _run(self, stream: Stream) -> None:
        header = memoryview(bytearray(_HEADER.size))
        while True:
            stream.read_into([header])
            tag, size = _HEADER.unpack(header)
            receive = self._match(tag, size)
            if receive is None:  # cancelled: the sender sent it before it heard of the cancel
                self._discard(stream, size)
            else:
                self._take(stream, receive)

    def _match(self, tag: int, size: int) -> Receive | None:
        with self._lock:
            receive = self._posted.pop(tag, None)
            if receive is not None:
                self._matched.append(receive)
        expected = size
        if receive is not None:
            expected = self._memory.form_of(receive.blocks).size_of(receive.blocks)
        if size != expected:
            raise TransferError(f"message {tag} has {size} bytes, {expected} were posted")
        return receive

    def _take(self, stream: Stream, receive: Receive) -> None:
        """Get the bytes of a message, whose header was read, into its blocks."""
        form = self._memory.form_of(receive.blocks)
        for blocks in pieces(receive.blocks, form.nbytes, self._room.piece_bytes, form.names):
            views = self._memory.in_place(blocks)
            if views:
                stream.read_into(views)
                continue
            with self._staged(stream.sock, form.size_of(blocks)) as piece:
                stream.read_into([piece])
                self._memory.scatter(blocks, piece)
        self._complete(receive)

    def _complete(self, receive: Receive) -> None:
        with self._lock:
            self._matched.remove(receive)
        self._post(settle, receive.done, None)

    def _discard(self, stream: Stream, size: int) -> None:
        scratch = memoryview(bytearray(min(size, _DISCARD_BYTES)))
        while size:
            part = scratch[: min(size, scratch.nbytes)]
            stream.read_into([part])
            size -= part.nbytes

    def _fail_all(self, error: TransferError) -> None:
        with self._lock:
            receives = [*self._posted.values(), *self._matched]
            self._posted.clear()
            self._matched.clear()
        for receive in receives:
            settle(receive.done, error)


class TcpSendingLink(_SocketThread):
    """Prefill's end: a queue of messages, written by the sender thread."""

    def __init__(
        self,
        memory: PageMemory,
        room: StagingRoom[memoryview],
        stream: Stream,
        on_lost: Callable[[], None],
        on_crash: Callable[[], None],
    ) -> None:
        super().__init__(memory, room, on_lost, on_crash)
        self._queue: queue.SimpleQueue[OutgoingMessage | None] = queue.SimpleQueue()
        self._unsent: set[asyncio.Future[None]] = set()
        self._start(stream)
        self._watch(stream.sock)

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            if self._closed or self._over.is_set():
                done.set_exception(TransferError("the link is closed"))
                return done
            self._unsent.add(done)
        done.add_done_callback(self._unsent.discard)
        self._queue.put(OutgoingMessage(tag, tuple(blocks), done))
        return done

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        raise TransferError("KV blocks travel from prefill to decode only")

    def cancel_receive(self, tag: int) -> bool:
        return False

    async def close(self) -> None:
        if self._stream is not None and not self._closed:
            self._loop.remove_reader(self._stream.sock)
        await super().close()

    def _watch(self, sock: socket.socket) -> None:
        self._loop.add_reader(sock, self._readable, sock)
        sock.setblocking(True)  # uvloop makes the sockets that it watches non-blocking; the thread is to wait

    def _readable(self, sock: socket.socket) -> None:
        """End the link: decode never writes here, so the connection has ended, which an idle thread would not
        notice."""
        self._loop.remove_reader(sock)
        shut_down(sock)
        self._wake()

    def _run(self, stream: Stream) -> None:
        while (message := self._queue.get()) is not None:
            self._put(stream, message)

    def _put(self, stream: Stream, message: OutgoingMessage) -> None:
        """Send a message, header and bytes."""
        lead, form = [self._header(message)], self._memory.form_of(message.blocks)
        for blocks in pieces(message.blocks, form.nbytes, self._room.piece_bytes, form.names):
            views = self._memory.in_place(blocks)
            if views:
                stream.write(lead + views)
            else:
                with self._staged(stream.sock, form.size_of(blocks)) as piece:
                    self._memory.gather(blocks, piece)
                    stream.write([*lead, piece])
            lead = []
        self._post(settle, message.done, None)

    def _header(self, message: OutgoingMessage) -> memoryview:
        size = self._memory.form_of(message.blocks).size_of(message.blocks)
        return memoryview(_HEADER.pack(message.tag, size))

    def _wake(self) -> None:
        self._queue.put(None)

    def _fail_all(self, error: TransferError) -> None:
        for done in list(self._unsent):
            settle(done, error)


class TcpConnector:
    """``Connector`` over TCP. Plain without ``tls``: then keep it on a network of your own."""

    name = "tcp"
    drained_is_proof = False

    def __init__(self, staging: Staging, on_crash: Callable[[], None], tls: DataTls | None = None) -> None:
        """``on_crash`` ends the worker: an unexpected error on a thread leaves pages pinned for ever."""
        self._staging = staging
        self._on_crash = on_crash
        self._tls = tls
        self._expected: dict[bytes, TcpReceivingLink] = {}
        self._listener = DataListener(_MAGIC, self._expected, self._admitted, tls)

    async def listen(self, host: str, port: int) -> str:
        return self._listener.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        def forget() -> None:
            self._expected.pop(token, None)

        link = TcpReceivingLink(memory, self._staging.receiving, on_lost, self._on_crash, forget)
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, stream: Stream) -> None:
        stream.sock.setblocking(True)
        _tune(stream.sock)
        self._expected.pop(token).attach(stream)

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        stream = await dial(address, _MAGIC, token, self._tls)
        _tune(stream.sock)
        return TcpSendingLink(memory, self._staging.sending, stream, on_lost, self._on_crash)

    async def close(self) -> None:
        await self._listener.close()


def _tune(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def connected(sock: socket.socket) -> bool:
    """Return whether neither end has shut the socket down, even if unread bytes lie in it."""
    poll = select.poll()
    poll.register(sock, _HUNG_UP)
    return not poll.poll(0)


def shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("the data connection was closed already")


def tcp(settings: ConnectorSettings) -> TcpConnector:
    """Make the connector. Raises ConfigError for certificates that cannot be used here."""
    tls = None if settings.tls is None else DataTls(settings.tls)
    return TcpConnector(settings.staging, settings.on_crash, tls)
