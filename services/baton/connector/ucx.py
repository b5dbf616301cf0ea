"""The ``ucx`` connector: shared memory, TCP, RDMA and NVLink through UCX (``ucxx``, the extra ``ucx``).

**Who copies.** A page must change only while this process can tell. Messages are tagged and always go by
rendezvous: the sender announces, and nothing moves until the receiver's own thread has found the
announcement, looked the tag up among what was posted and handed UCX the pages. A receive that nothing has
matched is an entry in a table of ours, so cancelling it is exact; what was cancelled or never posted is
received into no bytes at all, which sets its sender free. From there on the *receiving* process copies, in
one of two ways, of which decode picks one for each link:

- ``get``: it reads the sender's memory (shared memory with cross-memory attach, or RDMA), no copy between;
- ``am``: it takes the bytes out of the transport's own buffers (TCP, or shared memory without attach).

A put, in which the peer writes by itself, is never used, unless the user sets ``UCX_RNDV_SCHEME``.

**The fence.** Closing an endpoint does not end what was matched: UCX reports the request over, or leaves it
running, and a matched receive cannot be cancelled. So ``close`` returns only when every request of the link
was reported over. Eager messages of several fragments are never reported over if the sender stops in mid-
message, and go on filling the pages after a forced close (seen with UCX 1.21). That is why
``UCX_RNDV_THRESH`` is always 0 here, and why ``get`` is asked for only where there is something to get with:
without, UCX sends eagerly. Should a request hang all the same, ``close`` does not return, and the worker
retires rather than reuse the pages.

The source may be read by the peer after a ``close`` in ``get`` mode; what it then reads is never committed
(rule 4).

**Pieces.** A message goes as one UCX message for each of its pieces (``staging``), all with one tag, but for
a bit that marks the last; UCX keeps their order. A piece moves from pages to pages if its blocks are adjacent
at both ends, and by way of staging memory otherwise. While there is none free at the receiver, what was
announced stays with UCX. The receiver knows how many bytes are to come: a message that is longer or shorter,
or another that begins before its end, closes the link. A sender that says nothing more is not malformed, as
nobody can tell it from a slow one: the handoff's cancel and fence end that.

Peers meet at a door of our own (token first), exchange UCX addresses there and leave the socket open: it
tells at once when the other process dies, for which UCX's keepalive takes longer.

**A GPU's pool** is handed to UCX as it is where the bytes are read (``get``: CUDA IPC, NVLink, RDMA), and
goes through the pinned host memory of ``staging`` where they would go over TCP (``am``). This has not run on
a device yet.

One thread owns all of UCX (``ucx_driver``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.connector.door import HANDSHAKE_S, Door, Watch, dial, receive_exactly
from baton.connector.staging import Room, Staging, piece_blocks
from baton.connector.stream import Stream
from baton.connector.transport import DeviceView, Link, PageMemory, TransferError
from baton.connector.ucx_driver import Driver, Endpoint

log = logging.getLogger(__name__)

_MAGIC = b"baton-ucx-1\n"
_OK = 0
_LAST = 1
_WINDOW = 32
"""Pieces of one link that UCX has at a time."""
_GET, _AM = b"g", b"a"
_SCHEMES = {_GET: "get_zcopy", _AM: "am"}
_HELLO = struct.Struct("!32s?")
_SIZE = struct.Struct("!H")


def _place() -> bytes:
    """Equal for two processes that can read each other's memory: one host, one user, the same namespaces."""
    parts = [str(os.getuid()), socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/user"):
        try:
            parts.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text())
        except OSError:
            parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).digest()


def _wire_tag(token: bytes, tag: int) -> int:
    """A message's name within the UCX tag space, which all links of a worker share: 63 bits that only the two
    ends of a link can know, from the link's token and the message's tag, matched in full. The bit ``_LAST``
    is set for the message's last piece."""
    digest = hashlib.blake2b(struct.pack("!Q", tag), key=token, digest_size=8).digest()
    return int.from_bytes(digest) & ~_LAST


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class _UcxLink:
    """What both ends share: an endpoint, a socket that tells of the peer's death, and the fence."""

    def __init__(self, memory: PageMemory, room: Room, on_lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._room = room
        self._on_lost = on_lost
        self._closed = False
        self._ended = False
        self._takes_device_memory = False
        self._driver: Driver | None = None
        self._endpoint: Endpoint | None = None
        self._watch: Watch | None = None
        self._running = 0
        """Requests of this link that UCX has not reported over. Of the driver's thread."""
        self._closing = False
        self._over = asyncio.Event()

    async def attach(self, driver: Driver, way: bytes, sock: socket.socket, address: bytes) -> None:
        """Make the endpoint. The socket is the link's from here on."""
        self._takes_device_memory = way == _GET
        made: asyncio.Future[None] = self._loop.create_future()

        def make() -> None:
            try:
                if not self._closed:
                    on_closed = partial(self.post, self._end, "the ucx endpoint was closed")
                    self._endpoint = driver.endpoint_on_thread(address, on_closed)
            except Exception as error:  # noqa: BLE001 (ucxx makes its exceptions at run time)
                self.post(_settle, made, TransferError(f"ucx: {error}"))
            else:
                self.post(_settle, made, None)

        self._driver = driver
        self._watch = Watch(sock, partial(self._end, "the peer has gone"))
        driver.call(make)
        await made

    def _views(self, blocks: Sequence[int]) -> Sequence[memoryview | DeviceView]:
        """Where UCX finds these blocks by itself; one view, if they are adjacent."""
        views = self._memory.in_place(blocks)
        return views or (self._memory.on_device(blocks) if self._takes_device_memory else [])

    def post(self, call: Callable[..., None], *args: object) -> None:
        """From the driver's thread to the event loop."""
        assert self._driver is not None
        self._driver.post_on_thread(call, *args)

    def _end(self, why: str) -> None:
        """The connection is no more: fail what can be failed, and tell once."""
        if self._closed or self._ended:
            return
        self._ended = True
        log.info("a data connection ended: %s", why)
        self._shut()
        self._on_lost()

    def refuse(self) -> None:
        """The peer came and did not get through the greeting."""
        self._end("the peer broke off the greeting")

    def fail_on_thread(self, why: str) -> None:
        self.post(self._end, why)

    def _shut(self) -> None:
        if self._watch is not None:
            self._watch.close()  # the peer learns it now, not when this end is closed
        self._fail_idle(TransferError("the data connection ended"))
        if self._driver is not None:
            self._driver.call(self._close_endpoint)

    def _close_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        self._closing = True
        if endpoint is not None:
            endpoint.close_blocking()
        self._report_over()

    def _started(self) -> None:
        self._running += 1

    def _finished(self) -> None:
        self._running -= 1
        self._report_over()

    def _report_over(self) -> None:
        if self._closing and self._running == 0:
            self.post(self._over.set)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._shut()
        if self._driver is not None:
            await self._over.wait()
        self._fail_idle(TransferError("the link was closed"))

    def _fail_idle(self, error: TransferError) -> None:
        """Fail every transfer of which no request runs."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class _Receive:
    """A posted receive. Its counts change on the driver's thread, under the table's lock."""

    link: ReceivingLink
    tag: int
    blocks: tuple[int, ...]
    size: int
    done: asyncio.Future[None]
    announced: int = 0
    """Bytes of the pieces matched so far."""
    landed: int = 0
    running: int = 0
    failed: bool = False


@dataclass(slots=True)
class _Landing:
    """Where a piece goes: into its blocks, or beside them first."""

    blocks: tuple[int, ...]
    memory: memoryview | DeviceView
    staging: memoryview | None = None
    """``memory``, if it is only on the way."""


class _Table:
    """What is posted, by wire tag, on all links: a driver's thread looks here for each piece announced."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._posted: dict[int, _Receive] = {}

    def post(self, key: int, receive: _Receive) -> bool:
        with self.lock:
            return self._posted.setdefault(key, receive) is receive

    def withdraw(self, key: int, receive: _Receive, *, matched_too: bool) -> bool:
        """Take a receive out, if nothing has matched it (or in any case). True: no request of it runs."""
        with self.lock:
            if receive.announced and not matched_too:
                return False
            if self._posted.get(key) is receive:
                del self._posted[key]
            receive.failed = True
            return receive.running == 0

    def deliver(self, driver: Driver, wire_tag: int, size: int) -> bool:
        """On the driver's thread: a piece was announced. What nobody wants is refused, as its sender waits
        for an answer. False: there is no room for it at present, so it is left with UCX."""
        key, last = wire_tag & ~_LAST, bool(wire_tag & _LAST)
        with self.lock:
            receive = self._posted.get(key)
            if receive is None:
                driver.refuse_on_thread(wire_tag)
                return True
            error = receive.link.objection(receive, size, last)
            landing = receive.link.place(driver, receive, size) if error is None else None
            if error is None and landing is None:
                return False
            if last or error is not None:
                del self._posted[key]
            if landing is not None:
                receive.announced += size
                receive.running += 1
        if landing is not None:
            receive.link.take(driver, receive, landing, wire_tag)
        elif error is not None:
            driver.refuse_on_thread(wire_tag)
            receive.link.fail_on_thread(error)
        return True


class ReceivingLink(_UcxLink):
    """Decode's end: receives lie in the table until a message is announced for them."""

    def __init__(
        self, memory: PageMemory, room: Room, table: _Table, token: bytes, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(memory, room, on_lost)
        self._table = table
        self._token = token
        self._mine: dict[int, _Receive] = {}
        self._arriving: _Receive | None = None
        """The one of which some pieces were announced, and others are to follow."""

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        receive = _Receive(self, tag, tuple(blocks), len(blocks) * self._memory.block_bytes, done)
        if self._closed or self._ended:
            done.set_exception(TransferError("the link is closed"))
        elif not self._table.post(_wire_tag(self._token, tag), receive):
            done.set_exception(TransferError(f"message {tag} is posted already"))
        else:
            self._mine[tag] = receive
            done.add_done_callback(lambda _: self._mine.pop(tag, None))
        return done

    def cancel_receive(self, tag: int) -> bool:
        receive = self._mine.get(tag)
        if receive is None:
            return False
        if not self._table.withdraw(_wire_tag(self._token, tag), receive, matched_too=False):
            return False
        _settle(receive.done, TransferError("cancelled before anything arrived"))
        return True

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        raise TransferError("KV blocks travel from prefill to decode only")

    def objection(self, receive: _Receive, size: int, last: bool) -> str | None:
        """Why a piece is not what a sender of ours sends: whole blocks, message after message, in full."""
        if self._arriving is not None and self._arriving is not receive:
            return f"message {receive.tag} began before the end of message {self._arriving.tag}"
        count, odd = divmod(size, self._memory.block_bytes)
        if odd or not 0 < count <= piece_blocks(self._memory.block_bytes):
            return f"message {receive.tag} has a piece of {size} bytes"
        if last != (receive.announced + size == receive.size):
            return f"message {receive.tag} has more or less than the {receive.size} bytes posted"
        return None

    def place(self, driver: Driver, receive: _Receive, size: int) -> _Landing | None:
        """Memory for the next piece of a message, if there is room."""
        first = receive.announced // self._memory.block_bytes
        blocks = receive.blocks[first : first + size // self._memory.block_bytes]
        views = self._views(blocks)
        if len(views) == 1:
            return _Landing(blocks, views[0])
        memory = self._room.take(size, driver.look_again)
        return None if memory is None else _Landing(blocks, memory, memory)

    def take(self, driver: Driver, receive: _Receive, landing: _Landing, wire_tag: int) -> None:
        """On the driver's thread: get the bytes of the piece that was matched with ``receive``."""
        self._arriving = None if wire_tag & _LAST else receive
        self._started()
        driver.receive_on_thread(wire_tag, landing.memory, partial(self._taken, receive, landing))

    def _taken(self, receive: _Receive, landing: _Landing, status: int) -> None:
        over = partial(self._landed, receive, landing, status)
        if landing.staging is not None and status == _OK:
            assert self._driver is not None
            scatter = partial(self._memory.scatter, landing.blocks, landing.staging)
            self._driver.copy_on_thread(scatter, over)
        else:
            over()

    def _landed(self, receive: _Receive, landing: _Landing, status: int) -> None:
        if landing.staging is not None:
            self._room.give_back(landing.staging)
        with self._table.lock:
            receive.running -= 1
            receive.landed += landing.memory.nbytes
            receive.failed = receive.failed or status != _OK
            failed, more = receive.failed, receive.running > 0
        if failed:
            if not more:
                self.post(_settle, receive.done, TransferError("the transfer was broken off"))
            if status != _OK:
                self.fail_on_thread(f"a receive ended with ucx status {status}")
        elif receive.landed == receive.size:
            self.post(_settle, receive.done, None)
        self._finished()

    def _fail_idle(self, error: TransferError) -> None:
        for receive in list(self._mine.values()):
            if self._table.withdraw(_wire_tag(self._token, receive.tag), receive, matched_too=True):
                _settle(receive.done, error)


@dataclass(slots=True, eq=False)
class _Message:
    tag: int
    blocks: tuple[int, ...]
    done: asyncio.Future[None]
    started: int = 0
    """Blocks of the pieces handed to UCX so far."""
    running: int = 0
    status: int = _OK
    cut_off: bool = False
    """No more pieces of it will be started."""


class SendingLink(_UcxLink):
    """Prefill's end: messages wait here, and go to UCX in order, some pieces at a time."""

    def __init__(self, memory: PageMemory, room: Room, token: bytes, on_lost: Callable[[], None]) -> None:
        super().__init__(memory, room, on_lost)
        self._token = token
        self._waiting: deque[_Message] = deque()

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        if self._closed or self._ended or self._driver is None:
            done.set_exception(TransferError("the link is closed"))
            return done
        self._waiting.append(_Message(tag, tuple(blocks), done))
        self._driver.call(self._pump)
        return done

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        raise TransferError("KV blocks travel from prefill to decode only")

    def cancel_receive(self, tag: int) -> bool:
        return False

    def _pump(self) -> None:
        """On the driver's thread: start the next pieces."""
        while self._endpoint is not None and self._waiting and self._running < _WINDOW:
            if not self._start_piece(self._endpoint, self._waiting[0]):
                return
            if self._waiting[0].started == len(self._waiting[0].blocks):
                self._waiting.popleft()

    def _start_piece(self, endpoint: Endpoint, message: _Message) -> bool:
        """False: there is no room for it at present."""
        driver, block_bytes = self._driver, self._memory.block_bytes
        assert driver is not None
        blocks = message.blocks[message.started : message.started + piece_blocks(block_bytes)]
        views = self._views(blocks)
        staged = None
        if len(views) != 1:
            staged = self._room.take(len(blocks) * block_bytes, self._pump_soon)
            if staged is None:
                return False
            self._memory.gather(blocks, staged)
        message.started += len(blocks)
        message.running += 1
        last = _LAST if message.started == len(message.blocks) else 0
        tag = driver.ucp.UCXXTag(_wire_tag(self._token, message.tag) | last)
        self._started()
        request = endpoint.tag_send(driver.array(views[0] if staged is None else staged), tag)
        driver.watch_on_thread(request, partial(self._sent, message, staged))
        return True

    def _pump_soon(self) -> None:
        if self._driver is not None:
            self._driver.call(self._pump)

    def _sent(self, message: _Message, staged: memoryview | None, status: int) -> None:
        if staged is not None:
            self._room.give_back(staged)
        message.running -= 1
        message.status = message.status or status
        if message.running == 0 and (message.cut_off or message.started == len(message.blocks)):
            whole = message.status == _OK and not message.cut_off
            self.post(_settle, message.done, None if whole else TransferError("the transfer was broken off"))
        if status != _OK:
            self.fail_on_thread(f"a send ended with ucx status {status}")
        self._finished()
        self._pump()

    def _close_endpoint(self) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            message.cut_off = True
            if message.running == 0:  # or its pages may still be read
                self.post(_settle, message.done, TransferError("the link was closed"))
        super()._close_endpoint()

    def _fail_idle(self, error: TransferError) -> None:
        """What waits is the thread's, which fails it when it closes the endpoint."""


class UcxConnector:
    """``Connector`` over UCX. Not encrypted: keep it on a network of your own (``interface_options``)."""

    name = "ucx"
    drained_is_proof = False
    """This process copies, so its own requests' ends are the proof; see the module's text."""

    def __init__(
        self, staging: Staging, on_crash: Callable[[], None], options: Mapping[str, str] | None = None
    ) -> None:
        """``on_crash`` ends the worker: what a thread met leaves pages pinned for ever. ``options``: of UCX,
        without their prefix ``UCX_``. To be made on the event loop. Raises ImportError without ucxx."""
        drive = partial(Driver, extra=options or {}, on_crash=on_crash)
        self._staging = staging
        self._table = _Table()
        self._expected: dict[bytes, ReceivingLink] = {}
        self._door = Door(_MAGIC, self._expected, self._admitted)
        self._drivers: dict[bytes, Driver] = {_AM: drive(_SCHEMES[_AM], self._table.deliver)}
        self._has_rdma = any(re.match(r"(rc|dc|gga)", name) for name in self._drivers[_AM].transports)
        self._has_cma = "cma" in self._drivers[_AM].transports
        if self._has_cma or self._has_rdma:
            self._drivers[_GET] = drive(_SCHEMES[_GET], self._table.deliver)
        self._greetings: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> str:
        return self._door.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        link = _ExpectedLink(memory, self._staging.receiving, self._table, token, on_lost, self._expected)
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, stream: Stream) -> None:
        link = self._expected.pop(token)
        task = asyncio.create_task(self._welcome(link, stream.sock))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _welcome(self, link: ReceivingLink, sock: socket.socket) -> None:
        """Decode's half of the exchange: choose the way, make the endpoint, say go."""
        loop = asyncio.get_running_loop()
        attached = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                place, rdma = _HELLO.unpack(await receive_exactly(sock, _HELLO.size))
                way = self._way(place, rdma)
                driver = self._drivers[way]
                await loop.sock_sendall(sock, way + _SIZE.pack(len(driver.address)) + driver.address)
                address = await _receive_sized(sock)
                await loop.sock_sendall(sock, b"+")
                attached = True
                await link.attach(driver, way, sock, address)
        except (OSError, TransferError) as error:
            log.warning("a data connection was not made: %s", str(error) or "too slow")
            link.refuse()
        finally:
            if not attached:
                sock.close()

    def _way(self, place: bytes, rdma: bool) -> bytes:
        near = self._has_cma and place == self._place()
        return _GET if near or (self._has_rdma and rdma) else _AM

    def _place(self) -> bytes:
        return _place() if self._has_cma else bytes(32)

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        loop = asyncio.get_running_loop()
        link = SendingLink(memory, self._staging.sending, token, on_lost)
        sock = (await dial(address, _MAGIC, token)).sock
        attached = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.sock_sendall(sock, _HELLO.pack(self._place(), self._has_rdma))
                way = await receive_exactly(sock, 1)
                peer = await _receive_sized(sock)
                driver = self._drivers.get(way)
                if driver is None:
                    raise TransferError("decode chose a way that was not offered")
                await loop.sock_sendall(sock, _SIZE.pack(len(driver.address)) + driver.address)
                await receive_exactly(sock, 1)
                attached = True
                await link.attach(driver, way, sock, peer)
        except BaseException:
            await link.close()
            raise
        finally:
            if not attached:
                sock.close()
        log.info("a ucx link uses %s", _SCHEMES[way])
        return link

    async def close(self) -> None:
        await self._door.close()
        for task in self._greetings:
            task.cancel()
        await asyncio.gather(*self._greetings, return_exceptions=True)
        for driver in self._drivers.values():
            await driver.close()


class _ExpectedLink(ReceivingLink):
    """A receiving link that nobody may come to any more once it is closed."""

    def __init__(
        self,
        memory: PageMemory,
        room: Room,
        table: _Table,
        token: bytes,
        on_lost: Callable[[], None],
        expected: dict[bytes, ReceivingLink],
    ) -> None:
        super().__init__(memory, room, table, token, on_lost)
        self._expected = expected

    async def close(self) -> None:
        self._expected.pop(self._token, None)
        await super().close()


async def _receive_sized(sock: socket.socket) -> bytes:
    (size,) = _SIZE.unpack(await receive_exactly(sock, _SIZE.size))
    return await receive_exactly(sock, size)
