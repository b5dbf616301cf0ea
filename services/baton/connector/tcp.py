"""The ``tcp`` connector: the standard library only, the default where nothing better is there.

One socket per link. A message is a 16-byte header (tag, size) and its bytes, which go from the sender's pages
to the socket and from the socket into the receiver's pages without a copy between. Each end has one thread: a
blocking ``recv_into`` or ``sendall`` releases the GIL and needs no event loop turn per packet, and neither
the engine nor the control plane waits for it. Once ``close`` has joined the thread, nothing can touch a page:
that is the fence.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.connector.door import Door, dial
from baton.connector.transport import Link, PageMemory, TransferError

log = logging.getLogger(__name__)

_HEADER = struct.Struct("!QQ")
_MAGIC = b"baton-tcp-1\n"
_DISCARD_BYTES = 1 << 20
_SOCKET_BUFFER_BYTES = 4 << 20


@dataclass(slots=True)
class _Receive:
    blocks: tuple[int, ...]
    done: asyncio.Future[None]


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class _SocketThread:
    """What both ends share: a socket, a thread on it, and a close that waits for the thread."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._closed = False
        self._over = asyncio.Event()
        """The thread has done all it will ever do."""
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def _start(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._socket = sock
            self._thread = threading.Thread(target=self._main, name="kv-" + type(self).__name__, daemon=True)
            self._thread.start()

    def _main(self) -> None:
        assert self._socket is not None
        try:
            self._run(self._socket)
        except (OSError, TransferError) as error:
            if not self._closed:
                log.info("a data connection ended: %s", error)
        finally:
            _shut_down(self._socket)  # the peer learns it now, not when this end is closed
            self._post(self._ended)

    def _run(self, sock: socket.socket) -> None:
        raise NotImplementedError

    def _post(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the process is ending
            log.debug("a completion came after the event loop had ended")

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
            sock, thread = self._socket, self._thread
        if sock is not None:
            _shut_down(sock)
        self._wake()
        if thread is not None:
            # Not on the loop's executor: others can fill that up, and a join that never ends would keep the
            # process from ending, which is what is left to do then.
            await self._over.wait()
            thread.join()
        if sock is not None:
            sock.close()
        self._fail_all(TransferError("the link was closed"))

    def _wake(self) -> None:
        """Let a thread that waits for something other than the socket see that the link is closed."""


class ReceivingLink(_SocketThread):
    """Decode's end: posted receives, filled by the reader thread."""

    def __init__(
        self, memory: PageMemory, on_lost: Callable[[], None], on_closed: Callable[[], None]
    ) -> None:
        super().__init__(on_lost)
        self._memory = memory
        self._on_closed = on_closed
        self._posted: dict[int, _Receive] = {}
        self._matched: _Receive | None = None

    async def close(self) -> None:
        self._on_closed()
        await super().close()

    def attach(self, sock: socket.socket) -> None:
        """The peer has connected and shown its token."""
        self._start(sock)

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        receive = _Receive(tuple(blocks), self._loop.create_future())
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
        _settle(receive.done, TransferError("cancelled before anything arrived"))
        return True

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        raise TransferError("KV blocks travel from prefill to decode only")

    def _run(self, sock: socket.socket) -> None:
        header = memoryview(bytearray(_HEADER.size))
        while True:
            _receive_exactly(sock, header)
            tag, size = _HEADER.unpack(header)
            with self._lock:
                receive = self._matched = self._posted.pop(tag, None)
            if receive is None:  # cancelled: the sender had posted it before it heard so
                self._discard(sock, size)
                continue
            expected = len(receive.blocks) * self._memory.block_bytes
            if size != expected:
                raise TransferError(f"message {tag} has {size} bytes, {expected} were posted")
            views = self._memory.target(receive.blocks)
            self._fill(sock, views)
            self._memory.landed(receive.blocks, views)
            del views
            self._matched = None
            self._post(_settle, receive.done, None)

    def _fill(self, sock: socket.socket, views: list[memoryview]) -> None:
        """Take the bytes of a message; its header was read."""
        for view in views:
            _receive_exactly(sock, view)

    def _discard(self, sock: socket.socket, size: int) -> None:
        scratch = memoryview(bytearray(min(size, _DISCARD_BYTES)))
        while size:
            part = scratch[: min(size, scratch.nbytes)]
            _receive_exactly(sock, part)
            size -= part.nbytes

    def _fail_all(self, error: TransferError) -> None:
        with self._lock:
            receives = list(self._posted.values())
            self._posted.clear()
            if self._matched is not None:
                receives.append(self._matched)
                self._matched = None
        for receive in receives:
            _settle(receive.done, error)


@dataclass(slots=True)
class _Message:
    tag: int
    blocks: tuple[int, ...]
    done: asyncio.Future[None]


class SendingLink(_SocketThread):
    """Prefill's end: a queue of messages, written by the sender thread."""

    def __init__(self, memory: PageMemory, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        super().__init__(on_lost)
        self._memory = memory
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._unsent: set[asyncio.Future[None]] = set()
        self._start(sock)
        self._loop.add_reader(sock, self._readable, sock)
        sock.setblocking(True)  # uvloop makes what it watches non-blocking; the thread is to wait

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            if self._closed or self._over.is_set():
                done.set_exception(TransferError("the link is closed"))
                return done
            self._unsent.add(done)
        done.add_done_callback(self._unsent.discard)
        self._queue.put(_Message(tag, tuple(blocks), done))
        return done

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        raise TransferError("KV blocks travel from prefill to decode only")

    def cancel_receive(self, tag: int) -> bool:
        return False

    async def close(self) -> None:
        if self._socket is not None and not self._closed:
            self._loop.remove_reader(self._socket)
        await super().close()

    def _readable(self, sock: socket.socket) -> None:
        """Decode never writes here: the connection has ended, which an idle thread would not notice."""
        self._loop.remove_reader(sock)
        _shut_down(sock)
        self._wake()

    def _run(self, sock: socket.socket) -> None:
        while (message := self._queue.get()) is not None:
            views = self._memory.source(message.blocks)
            sock.sendall(_HEADER.pack(message.tag, sum(view.nbytes for view in views)))
            self._write(sock, views)
            self._post(_settle, message.done, None)

    def _write(self, sock: socket.socket, views: list[memoryview]) -> None:
        """Send the bytes of a message; its header was sent."""
        for view in views:
            sock.sendall(view)

    def _wake(self) -> None:
        self._queue.put(None)

    def _fail_all(self, error: TransferError) -> None:
        for done in list(self._unsent):
            _settle(done, error)


class TcpConnector:
    """``Connector`` over plain TCP sockets. Not encrypted: keep it on a network of your own."""

    name = "tcp"
    drained_is_proof = False

    def __init__(self) -> None:
        self._expected: dict[bytes, ReceivingLink] = {}
        self._door = Door(_MAGIC, self._expected, self._admitted)

    async def listen(self, host: str, port: int) -> str:
        return self._door.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        def forget() -> None:
            self._expected.pop(token, None)

        link = ReceivingLink(memory, on_lost, forget)
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, sock: socket.socket) -> None:
        sock.setblocking(True)
        _tune(sock)
        self._expected.pop(token).attach(sock)

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        sock = await dial(address, _MAGIC, token)
        _tune(sock)
        return SendingLink(memory, sock, on_lost)

    async def close(self) -> None:
        await self._door.close()


def _tune(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("the data connection was closed already")


def _receive_exactly(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = sock.recv_into(view)
        if count == 0:
            raise TransferError("the peer closed the connection")
        view = view[count:]
