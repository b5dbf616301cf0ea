"""The ``ucx`` connector: shared memory, TCP, RDMA and NVLink through UCX (``ucxx``, the extra ``ucx``).

**Who copies.** A page must change only while this process can tell. Messages are tagged and always go by
rendezvous: the sender announces, and nothing moves until the receiver's own thread has found the
announcement, looked the tag up among the posted receives and handed UCX the pages. A receive that no message
has matched is an entry in a table of ours, so cancelling it is exact; a message whose receive was cancelled
or never posted is received into no bytes at all, which sets its sender free. From there on the *receiving*
process copies, in one of two ways, of which decode picks one for each link:

- ``get``: it reads the sender's memory (shared memory with cross-memory attach, or RDMA), no copy between;
- ``am``: it takes the bytes out of the transport's own buffers (TCP, or shared memory without attach).

A put, in which the peer writes by itself, is never used, unless the user sets ``UCX_RNDV_SCHEME``.

**The fence.** Closing an endpoint does not end a matched transfer: UCX reports the request over, or leaves it
running, and a matched receive cannot be cancelled. So ``close`` returns only when every request of the link
was reported over. Eager messages of several fragments are never reported over if the sender stops in
mid-message, and go on filling the pages after a forced close (seen with UCX 1.21). That is why
``UCX_RNDV_THRESH`` is always 0 here, and why ``get`` is asked for only where a transport for it exists:
without one, UCX sends eagerly. Should a request hang all the same, ``close`` does not return, and the worker
retires rather than reuse the pages.

In ``get`` mode the peer may read the source after a ``close``; what it then reads is never committed (rule
4).

**Pieces.** A message goes as one UCX message for each of its pieces (``staging``), all with one tag, but for
a bit that marks the last; UCX keeps their order. A piece moves from pages to pages if its blocks are adjacent
at both ends, and by way of staging memory otherwise. While the receiver has no staging memory free, the
announced piece stays with UCX. The receiver knows how many bytes are to come: a message that is longer or
shorter, or another that begins before its end, closes the link. A sender that falls silent is not malformed,
as it cannot be told from a slow one: the handoff's cancel and fence end that.

Peers connect to a listener of our own (token first), exchange UCX addresses there and leave the socket open:
it tells at once when the other process dies, for which UCX's keepalive takes longer.

**A GPU's pool** is handed to UCX as it is where the bytes are read (``get``: CUDA IPC, NVLink, RDMA), and
what is not adjacent there goes through other memory of the device; where the bytes would go over TCP
(``am``), all of it goes through the pinned host memory of ``staging``. Decode reads a pool on its own host if
it has opened it (``cuda_ipc``), as UCX would then do too, in whatever pods the two are. This has not run on a
device yet.

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
from typing import ClassVar

from baton.transport.base import (
    ConnectorMissingError,
    ConnectorSettings,
    DeviceStaging,
    DeviceView,
    Link,
    PageMemory,
    TransferError,
)
from baton.transport.cuda_ipc import HANDLE_BYTES, UUID_BYTES, CudaIpc, host_id
from baton.transport.data_listener import HANDSHAKE_S, DataListener, Watch, dial, receive_exactly
from baton.transport.staging import LARGEST_PIECE_BYTES, PIECE_BYTES, Staging, StagingRoom, piece_blocks
from baton.transport.stream import Stream
from baton.transport.ucx_driver import Driver, UcxEndpoint, interface_options

log = logging.getLogger(__name__)

_MAGIC = b"baton-ucx-2\n"
_OK = 0
_CLOSED = -1
"""The status of a piece whose link was closed before UCX had it."""
_LAST = 1
_WINDOW = 32
"""Most pieces of one link that UCX has at a time."""
_GET, _AM = b"g", b"a"
_SCHEMES = {_GET: "get_zcopy", _AM: "am"}
_SIZE = struct.Struct("!H")


def _place() -> bytes:
    """Return bytes that are equal for two processes that can read each other's memory: one host, one user,
    the same namespaces."""
    parts = [str(os.getuid()), socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/user"):
        try:
            parts.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text())
        except OSError:
            parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).digest()


@dataclass(frozen=True, slots=True)
class _Hello:
    """The words of prefill's end by which decode chooses the way."""

    place: bytes
    """``_place`` of a process whose memory can be read with cross-memory attach; zeros of any other."""
    rdma: bool
    on_device: bool
    piece_bytes: int
    host: bytes
    """``host_id``; zeros where no handle can be opened."""
    pid: int
    uuid: bytes
    """The UUID of the device that the pool is on."""
    handle: bytes
    """The handle by which the pool can be opened."""

    FORM: ClassVar = struct.Struct(f"!32s??II32s{UUID_BYTES}s{HANDLE_BYTES}s")

    def packed(self) -> bytes:
        parts = (self.place, self.rdma, self.on_device, self.piece_bytes, self.pid)
        return self.FORM.pack(*parts, self.host, self.uuid, self.handle)

    @classmethod
    def of(cls, data: bytes) -> _Hello:
        """Raises TransferError for what no sender of Baton says."""
        place, rdma, on_device, piece_bytes, pid, host, uuid, handle = cls.FORM.unpack(data)
        if not 0 < piece_bytes <= LARGEST_PIECE_BYTES:
            raise TransferError(f"the peer's pieces have {piece_bytes} bytes")
        return cls(place, rdma, on_device, piece_bytes, host, pid, uuid, handle)


def _wire_tag(token: bytes, tag: int) -> int:
    """Return a message's name within the UCX tag space, which all links of a worker share: 63 bits that only
    the two ends of a link can know, from the link's token and the message's tag, matched in full. The bit
    ``_LAST`` is set for the message's last piece."""
    digest = hashlib.blake2b(struct.pack("!Q", tag), key=token, digest_size=8).digest()
    return int.from_bytes(digest) & ~_LAST


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


_Piece = memoryview | DeviceView


@dataclass(frozen=True, slots=True)
class _Rooms:
    """The room for pieces of one direction: in host memory, and on the pool's device if it is on one."""

    on_host: StagingRoom[_Piece]
    on_device: StagingRoom[_Piece] | None = None


class _UcxLink:
    """The state that both ends of a link have: an endpoint, a socket that tells of the peer's death, and the
    fence."""

    def __init__(self, memory: PageMemory, rooms: _Rooms, on_lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._rooms = rooms
        self._room: StagingRoom[_Piece] = rooms.on_host
        self._on_lost = on_lost
        self._closed = False
        self._ended = False
        self._takes_device_memory = False
        self._driver: Driver | None = None
        self._endpoint: UcxEndpoint | None = None
        self._watch: Watch | None = None
        self._running = 0
        """Requests of this link that UCX has not reported over. The driver's thread owns the count."""
        self._closing = False
        self._over = asyncio.Event()

    async def attach(self, driver: Driver, way: bytes, sock: socket.socket, address: bytes) -> None:
        """Make the endpoint. The socket is the link's from here on."""
        self._takes_device_memory = way == _GET
        if way == _GET and self._rooms.on_device is not None:
            self._room = self._rooms.on_device
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
        """Return the memory of these blocks that UCX reads or writes by itself; one view, if they are
        adjacent."""
        views = self._memory.in_place(blocks)
        return views or (self._memory.on_device(blocks) if self._takes_device_memory else [])

    def post(self, call: Callable[..., None], *args: object) -> None:
        """Make a call on the event loop, from the driver's thread."""
        assert self._driver is not None
        self._driver.post_on_thread(call, *args)

    def _end(self, why: str) -> None:
        """End the link: fail the transfers that can be failed, and call ``on_lost`` once."""
        if self._closed or self._ended:
            return
        self._ended = True
        log.info("a data connection ended: %s", why)
        self._shut()
        self._on_lost()

    def refuse(self) -> None:
        """End the link because the peer connected but failed the greeting."""
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

    link: UcxReceivingLink
    tag: int
    blocks: tuple[int, ...]
    size: int
    done: asyncio.Future[None]
    announced: int = 0
    """The bytes of the pieces matched so far."""
    landed: int = 0
    running: int = 0
    failed: bool = False


@dataclass(slots=True)
class _Landing:
    """The memory for a piece: its blocks, or staging memory to be copied from."""

    blocks: tuple[int, ...]
    memory: memoryview | DeviceView
    staging: _Piece | None = None
    """``memory``, if it is staging memory."""


class _Table:
    """The posted receives of all links, by wire tag: the driver's thread looks here for each announced
    piece."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._posted: dict[int, _Receive] = {}

    def post(self, key: int, receive: _Receive) -> bool:
        with self.lock:
            return self._posted.setdefault(key, receive) is receive

    def withdraw(self, key: int, receive: _Receive, *, matched_too: bool) -> bool:
        """Take a receive out, if no message has matched it (or in any case, with ``matched_too``). True: no
        request of it runs."""
        with self.lock:
            if receive.announced and not matched_too:
                return False
            if self._posted.get(key) is receive:
                del self._posted[key]
            receive.failed = True
            return receive.running == 0

    def deliver(self, driver: Driver, wire_tag: int, size: int) -> bool:
        """Match an announced piece, on the driver's thread. A piece without a posted receive is refused, as
        its sender waits for an answer. False: there is no room for the piece at present, so it is left with
        UCX."""
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


class UcxReceivingLink(_UcxLink):
    """Decode's end: receives lie in the table until a message is announced for them."""

    def __init__(
        self,
        memory: PageMemory,
        rooms: _Rooms,
        table: _Table,
        token: bytes,
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(memory, rooms, on_lost)
        self.piece_bytes = PIECE_BYTES
        """The most bytes of the sender's pieces, unless one block is larger."""
        self._table = table
        self._token = token
        self._mine: dict[int, _Receive] = {}
        self._arriving: _Receive | None = None
        """The receive of which some pieces were announced, and others are to follow."""

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        receive = _Receive(self, tag, tuple(blocks), self._memory.form_of(blocks).size_of(blocks), done)
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
        """Return why a piece is not what a Baton sender sends (whole blocks, message after message, in full),
        or None."""
        if self._arriving is not None and self._arriving is not receive:
            return f"message {receive.tag} began before the end of message {self._arriving.tag}"
        block_bytes = self._memory.form_of(receive.blocks).nbytes
        count, odd = divmod(size, block_bytes)
        if odd or not 0 < count <= piece_blocks(block_bytes, self.piece_bytes):
            return f"message {receive.tag} has a piece of {size} bytes"
        if last != (receive.announced + size == receive.size):
            return f"message {receive.tag} has more or less than the {receive.size} bytes posted"
        return None

    def place(self, driver: Driver, receive: _Receive, size: int) -> _Landing | None:
        """Return memory for the next piece of a message, or None if there is no room."""
        form = self._memory.form_of(receive.blocks)
        first, count = receive.announced // form.nbytes, size // form.nbytes
        blocks = receive.blocks[first * form.names : (first + count) * form.names]
        views = self._views(blocks)
        if len(views) == 1:
            return _Landing(blocks, views[0])
        memory = self._room.take(size, driver.look_again)
        return None if memory is None else _Landing(blocks, memory, memory)

    def take(self, driver: Driver, receive: _Receive, landing: _Landing, wire_tag: int) -> None:
        """Get the bytes of the piece that was matched with ``receive``, on the driver's thread."""
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
    """The blocks of the pieces handed to UCX so far."""
    running: int = 0
    status: int = _OK
    cut_off: bool = False
    """Whether no more pieces of the message will be started."""


class UcxSendingLink(_UcxLink):
    """Prefill's end: messages wait here, and go to UCX in order, some pieces at a time."""

    def __init__(self, memory: PageMemory, rooms: _Rooms, token: bytes, on_lost: Callable[[], None]) -> None:
        super().__init__(memory, rooms, on_lost)
        self._token = token
        self._piece_bytes = (rooms.on_device or rooms.on_host).piece_bytes
        self._waiting: deque[_Message] = deque()
        self._gathering = False
        """Whether a piece is being copied from a device: the ones behind it wait, as they go in order."""

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
        """Start the next pieces, on the driver's thread."""
        while self._may_start():
            if not self._start_piece(self._waiting[0]):
                return
            if self._waiting[0].started == len(self._waiting[0].blocks):
                self._waiting.popleft()

    def _may_start(self) -> bool:
        ready = self._endpoint is not None and not self._gathering
        return ready and bool(self._waiting) and self._running < _WINDOW

    def _start_piece(self, message: _Message) -> bool:
        """Start the next piece of a message. False: there is no room for it at present."""
        driver, form = self._driver, self._memory.form_of(message.blocks)
        assert driver is not None
        most = piece_blocks(form.nbytes, self._piece_bytes) * form.names
        blocks = message.blocks[message.started : message.started + most]
        views = self._views(blocks)
        staged = None
        if len(views) != 1:
            staged = self._room.take(form.size_of(blocks), self._pump_soon)
            if staged is None:
                return False
        message.started += len(blocks)
        message.running += 1
        self._started()
        last = message.started == len(message.blocks)
        if staged is None:
            self._send_piece(message, views[0], None, last)
        elif self._rooms.on_device is None:
            self._memory.gather(blocks, staged)
            self._send_piece(message, staged, staged, last)
        else:
            self._gathering = True
            gather = partial(self._memory.gather, blocks, staged)
            driver.copy_on_thread(gather, partial(self._gathered, message, staged, last))
        return True

    def _gathered(self, message: _Message, staged: _Piece, last: bool) -> None:
        self._gathering = False
        if self._endpoint is None:
            self._sent(message, staged, _CLOSED)
        else:
            self._send_piece(message, staged, staged, last)
            self._pump()

    def _send_piece(self, message: _Message, memory: _Piece, staged: _Piece | None, last: bool) -> None:
        driver, endpoint = self._driver, self._endpoint
        assert driver is not None and endpoint is not None
        tag = driver.ucp.UCXXTag(_wire_tag(self._token, message.tag) | (_LAST if last else 0))
        request = endpoint.tag_send(driver.array(memory), tag)
        driver.watch_on_thread(request, partial(self._sent, message, staged))

    def _pump_soon(self) -> None:
        if self._driver is not None:
            self._driver.call(self._pump)

    def _sent(self, message: _Message, staged: _Piece | None, status: int) -> None:
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
            if message.running == 0:  # before that, its pages may still be read
                self.post(_settle, message.done, TransferError("the link was closed"))
        super()._close_endpoint()

    def _fail_idle(self, error: TransferError) -> None:
        """Leave waiting messages to the driver's thread, which fails them when it closes the endpoint."""


class UcxConnector:
    """``Connector`` over UCX. Not encrypted: keep it on a network of your own (``interface_options``)."""

    name = "ucx"
    drained_is_proof = False
    """False because this process copies: the ends of its own requests are the proof (see the module's
    docstring)."""

    def __init__(
        self,
        staging: Staging,
        on_crash: Callable[[], None],
        options: Mapping[str, str] | None = None,
        device_staging: DeviceStaging | None = None,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_crash`` ends the worker: an unexpected error on a thread leaves pages pinned for ever.
        ``options``: options of UCX, without their prefix ``UCX_``. ``device_staging`` and ``enter_thread``:
        see ``ConnectorSettings``. Construct it on the event loop. Raises ImportError without ucxx."""
        drive = partial(Driver, extra=options or {}, on_crash=on_crash, enter_thread=enter_thread)
        on_device = device_staging
        self._sending = _Rooms(staging.sending, on_device.sending if on_device else None)
        self._receiving = _Rooms(staging.receiving, on_device.receiving if on_device else None)
        self._table = _Table()
        self._expected: dict[bytes, UcxReceivingLink] = {}
        self._listener = DataListener(_MAGIC, self._expected, self._admitted)
        first = drive(_SCHEMES[_AM], self._table.deliver)
        self._drivers: dict[bytes, Driver] = {_AM: first}
        self._has_rdma = any(re.match(r"(rc|dc|gga)", name) for name in first.transports)
        self._has_cma = on_device is None and "cma" in first.transports
        self._ipc = _ipc() if on_device is not None and "cuda_ipc" in first.transports else None
        if self._has_cma or self._has_rdma or self._ipc is not None:
            self._drivers[_GET] = drive(_SCHEMES[_GET], self._table.deliver)
        self._greetings: set[asyncio.Task[None]] = set()
        self.transports = first.transports
        """UCX's names of the ways that it has here: shared memory, TCP, RDMA, CUDA IPC."""
        log.info("ucx has the transports %s", ", ".join(sorted(self.transports)))
        if on_device is not None and not first.takes_device_memory:
            log.warning("this UCX knows nothing of CUDA: KV blocks go through host memory")

    @property
    def missing_for_rdma(self) -> str:
        if self._has_rdma:
            return ""
        return f"UCX has no verbs transport here, only {', '.join(sorted(self.transports))}"

    async def listen(self, host: str, port: int) -> str:
        return self._listener.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        link = _ExpectedLink(memory, self._receiving, self._table, token, on_lost, self._expected)
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, stream: Stream) -> None:
        link = self._expected.pop(token)
        task = asyncio.create_task(self._welcome(link, stream.sock))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _welcome(self, link: UcxReceivingLink, sock: socket.socket) -> None:
        """Do decode's half of the exchange: choose the way, make the endpoint, say go."""
        loop = asyncio.get_running_loop()
        attached = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                hello = _Hello.of(await receive_exactly(sock, _Hello.FORM.size))
                way, why = self._way(hello)
                link.piece_bytes = hello.piece_bytes
                driver = self._drivers[way]
                await loop.sock_sendall(sock, way + _SIZE.pack(len(driver.address)) + driver.address)
                address = await _receive_sized(sock)
                await loop.sock_sendall(sock, b"+")
                attached = True
                await link.attach(driver, way, sock, address)
                log.info("a ucx link uses %s: %s", _SCHEMES[way], why)
        except (OSError, TransferError) as error:
            log.warning("a data connection was not made: %s", str(error) or "too slow")
            link.refuse()
        finally:
            if not attached:
                sock.close()

    def _way(self, hello: _Hello) -> tuple[bytes, str]:
        """Return the way for a link and the reason for it."""
        if self._has_rdma and hello.rdma:
            return _GET, "both ends have RDMA"
        if hello.on_device != (self._receiving.on_device is not None):
            return _AM, "one pool is on a device, the other is not, and there is no RDMA"
        if not hello.on_device:
            near = self._has_cma and hello.place == _place()
            return (_GET, "one host's memory") if near else (_AM, "no RDMA and not one host's memory")
        missing = self._missing_for_ipc(hello)
        return (_AM, f"no RDMA, and {missing}") if missing else (_GET, "decode has opened prefill's pool")

    def _missing_for_ipc(self, hello: _Hello) -> str:
        """Return why UCX would not read the peer's device by CUDA IPC; empty if it would."""
        if self._ipc is None or not any(hello.handle):
            return "one end has no CUDA IPC"
        if hello.host != host_id():
            return "the two are not on one host"
        if hello.pid == os.getpid():
            return f"both processes have the number {hello.pid}, by which UCX takes them for one"
        if hello.uuid not in self._ipc.visible:
            return "decode does not see prefill's device"
        return "" if self._ipc.opens(hello.handle) else "decode cannot open prefill's pool"

    def _hello(self, memory: PageMemory) -> _Hello:
        room = self._sending.on_device or self._sending.on_host
        handle = uuid = b""
        if self._ipc is not None:
            views = memory.on_device([0])
            handle, uuid = self._ipc.handle(views[0].pointer) if views else b"", self._ipc.uuid
        return _Hello(
            _place() if self._has_cma else b"",
            self._has_rdma,
            self._sending.on_device is not None,
            room.piece_bytes,
            host_id() if handle else b"",
            os.getpid(),
            uuid,
            handle,
        )

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        loop = asyncio.get_running_loop()
        link = UcxSendingLink(memory, self._sending, token, on_lost)
        sock = (await dial(address, _MAGIC, token)).sock
        attached = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.sock_sendall(sock, self._hello(memory).packed())
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
        await self._listener.close()
        for task in self._greetings:
            task.cancel()
        await asyncio.gather(*self._greetings, return_exceptions=True)
        for driver in self._drivers.values():
            await driver.close()


class _ExpectedLink(UcxReceivingLink):
    """A receiving link that accepts no peer once it is closed."""

    def __init__(
        self,
        memory: PageMemory,
        rooms: _Rooms,
        table: _Table,
        token: bytes,
        on_lost: Callable[[], None],
        expected: dict[bytes, UcxReceivingLink],
    ) -> None:
        super().__init__(memory, rooms, table, token, on_lost)
        self._expected = expected

    async def close(self) -> None:
        self._expected.pop(self._token, None)
        await super().close()


def _ipc() -> CudaIpc | None:
    try:
        return CudaIpc()
    except OSError as error:
        log.warning("no CUDA IPC: %s", error)
        return None


async def _receive_sized(sock: socket.socket) -> bytes:
    (size,) = _SIZE.unpack(await receive_exactly(sock, _SIZE.size))
    return await receive_exactly(sock, size)


def ucx(settings: ConnectorSettings) -> UcxConnector:
    """Make the connector. Raises ImportError without ucxx, ConnectorMissingError where UCX does not start."""
    try:
        options = interface_options(settings.host)
        on_device, enter = settings.device_staging, settings.enter_thread
        return UcxConnector(settings.staging, settings.on_crash, options, on_device, enter)
    except ImportError:
        raise
    except Exception as error:
        # ucxx makes its exceptions at run time. One cause: UCX has none of the transports that UCX_TLS names.
        raise ConnectorMissingError(f"UCX does not start: {error}") from error
