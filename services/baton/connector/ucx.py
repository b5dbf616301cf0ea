"""The ``ucx`` connector: shared memory, TCP, RDMA and NVLink through UCX (``ucxx``, the extra ``ucx``).

**Who copies.** A page must change only while this process can tell. Messages are tagged and always go by
rendezvous: the sender announces, and nothing moves until the receiver's own thread has found the
announcement, looked the tag up among what was posted and handed UCX the pages. A receive that nothing has
matched is an entry in a table of ours, so cancelling it is exact; what was cancelled or never posted is taken
into scratch memory, which sets its sender free. From there on the *receiving* process copies, in one of two
ways, of which decode picks one for each link:

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
(rule 4). A message whose pages are not adjacent at the source goes as one UCX message per run: UCX keeps
their order, and the receiver fills its pages in order, whatever the pieces.

Peers meet at a door of our own (token first), exchange UCX addresses there and leave the socket open: it
tells at once when the other process dies, for which UCX's keepalive takes longer.

One thread owns all of UCX: it sleeps until UCX or the event loop has something for it, and UCX's own work
runs without the GIL. A GPU's pool goes through host memory (``PageMemory``). Views of device memory could be
handed to UCX as they are, if ``PageMemory`` gave objects with ``__cuda_array_interface__``; that, RDMA and
NVLink are untested.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import os
import re
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.connector.door import HANDSHAKE_S, Door, Watch, dial, receive_exactly
from baton.connector.transport import Link, PageMemory, TransferError

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

_MAGIC = b"baton-ucx-1\n"
_OK = 0
_WINDOW_BYTES = 32 << 20
"""What one link has handed to UCX at a time, and so how much of a device's pages is staged in host memory."""
_BUSY_WAIT_MS = 1
_IDLE_WAIT_S = 1.0
OPTIONS = {
    # Without these two, UCX uses neither shared memory nor cross-memory attach in error mode PEER.
    "MM_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",
    "KEEPALIVE_INTERVAL": "2s",
    # Twice the goodput of UCX's own 8 KiB, measured on loopback and through shared memory.
    "MM_SEG_SIZE": "65000",
    "TCP_TX_SEG_SIZE": "262144",
    "TCP_RX_SEG_SIZE": "262144",
}
"""Baton's defaults; an environment variable ``UCX_...`` of the same name goes first."""
_GET, _AM = b"g", b"a"
_SCHEMES = {_GET: "get_zcopy", _AM: "am"}
_HELLO = struct.Struct("!32s?")
_SIZE = struct.Struct("!H")


class _Request(Protocol):
    @property
    def completed(self) -> bool: ...

    @property
    def status(self) -> int: ...


class _Endpoint(Protocol):
    def tag_send(self, array: object, tag: object) -> _Request: ...

    def close_blocking(self) -> None: ...

    def set_close_callback(self, callback: Callable[[], None]) -> None: ...


class _Probe(Protocol):
    @property
    def matched(self) -> bool: ...

    @property
    def length(self) -> int: ...


def load() -> ModuleType:
    """ucxx, or ImportError. UCX reads its log settings when it is loaded; standard output is Baton's own."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    return importlib.import_module("ucxx._lib.libucxx")


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
    """A message's name within the UCX tag space, which all links of a worker share: 64 bits that only the two
    ends of a link can know, from the link's token and the message's tag, matched in full."""
    digest = hashlib.blake2b(struct.pack("!Q", tag), key=token, digest_size=8).digest()
    return int.from_bytes(digest)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class _Driver:
    """One UCX worker and the thread that owns it. Everything named ``on_thread`` runs there."""

    def __init__(
        self,
        scheme: str,
        deliver: Callable[[_Driver, int, int, _Probe], None],
        extra: Mapping[str, str],
    ) -> None:
        self.ucp = load()
        self.array = importlib.import_module("ucxx._lib.arr").Array
        options = {key: value for key, value in OPTIONS.items() if f"UCX_{key}" not in os.environ}
        if "UCX_RNDV_SCHEME" not in os.environ:
            options["RNDV_SCHEME"] = scheme
        options |= extra
        features = (self.ucp.Feature.TAG, self.ucp.Feature.WAKEUP)
        self._context = self.ucp.UCXContext({**options, "RNDV_THRESH": "0"}, features)
        self.worker = self.ucp.UCXWorker(self._context)
        self.worker.init_blocking_progress_mode()
        self.address = bytes(memoryview(self.worker.address))
        self._deliver = deliver
        self._any_tag = (self.ucp.UCXXTag(0), self.ucp.UCXXTagMask(0))
        self._calls: deque[Callable[[], None]] = deque()
        self._running: list[tuple[_Request, Callable[[int], None]]] = []
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._main, name=f"kv-ucx-{scheme}", daemon=True)
        self._thread.start()

    @property
    def transports(self) -> frozenset[str]:
        return frozenset(re.findall(r"flags \S+ (\w+)/", self._context.info))

    def call(self, work: Callable[[], None]) -> None:
        """Have ``work`` done on the thread, soon."""
        self._calls.append(work)
        os.eventfd_write(self._wake, 1)

    def watch_on_thread(self, request: _Request, over: Callable[[int], None]) -> None:
        """``over(status)`` once UCX has reported the request over, however it ended."""
        self._running.append((request, over))

    def _main(self) -> None:
        poller = select.epoll()
        poller.register(self._wake, select.EPOLLIN)
        poller.register(self.worker.epoll_file_descriptor, select.EPOLLIN)
        with poller:
            while not self._stopping:
                try:
                    if self._turn() or self._stopping:
                        continue
                    if self._running:
                        # UCX's own way to wait moves twice as much over TCP, but it hears UCX alone.
                        self.worker.progress_worker_event(_BUSY_WAIT_MS)
                        continue
                    events = poller.poll(_IDLE_WAIT_S)
                    if any(number == self._wake for number, _ in events):
                        os.eventfd_read(self._wake)
                except Exception:
                    log.exception("the ucx thread met an error; its links will not complete")
                    raise

    def _turn(self) -> bool:
        """Do what there is to do; True if there may be more."""
        while self._calls:
            self._calls.popleft()()
        self.worker.progress()
        busy = self._take_messages()
        running, self._running = self._running, []
        for request, over in running:
            if request.completed:
                busy = True
                over(request.status)
            else:
                self._running.append((request, over))
        # UCX may only be slept on when it agrees that nothing is pending.
        return busy or bool(self._calls) or not self.worker.arm()

    def _take_messages(self) -> bool:
        found = False
        while (probe := self.worker.tag_probe(*self._any_tag, True)).matched:
            found = True
            self._deliver(self, probe.sender_tag.value, probe.length, probe)
        return found

    def receive_on_thread(self, view: object, probe: _Probe, over: Callable[[int], None]) -> None:
        self.watch_on_thread(self.worker.tag_recv_with_handle(self.array(view), probe), over)

    def endpoint_on_thread(self, address: bytes, on_closed: Callable[[], None]) -> _Endpoint:
        peer = self.ucp.UCXAddress.create_from_buffer(address)
        endpoint: _Endpoint = self.ucp.UCXEndpoint.create_from_worker_address(self.worker, peer, True)
        endpoint.set_close_callback(on_closed)
        return endpoint

    async def close(self) -> None:
        def stop() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self.call(stop)
            await asyncio.to_thread(self._thread.join)
            os.close(self._wake)
            del self.worker, self._context


class _UcxLink:
    """What both ends share: an endpoint, a socket that tells of the peer's death, and the fence."""

    def __init__(self, memory: PageMemory, on_lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._on_lost = on_lost
        self._closed = False
        self._ended = False
        self._driver: _Driver | None = None
        self._endpoint: _Endpoint | None = None
        self._watch: Watch | None = None
        self._running = 0
        """Requests of this link that UCX has not reported over. Of the driver's thread."""
        self._closing = False
        self._over = asyncio.Event()

    async def attach(self, driver: _Driver, sock: socket.socket, address: bytes) -> None:
        """Make the endpoint. The socket is the link's from here on."""
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

    def post(self, call: Callable[..., None], *args: object) -> None:
        """From the driver's thread to the event loop."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the process is ending
            log.debug("a completion came after the event loop had ended")

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


@dataclass(slots=True)
class _Receive:
    """A posted receive. Its counts change on the driver's thread, under the table's lock."""

    link: ReceivingLink
    tag: int
    blocks: tuple[int, ...]
    size: int
    done: asyncio.Future[None]
    views: list[memoryview] = field(default_factory=list)
    announced: int = 0
    """Bytes of the messages matched so far."""
    landed: int = 0
    running: int = 0
    failed: bool = False

    def place(self, start: int, size: int) -> memoryview | None:
        """Memory of the pages for ``size`` bytes; None if these lie across two runs of pages."""
        for view in self.views:
            if start + size <= view.nbytes:
                return view[start : start + size]
            if start < view.nbytes:
                return None
            start -= view.nbytes
        return None

    def scatter(self, start: int, piece: memoryview) -> None:
        for view in self.views:
            if start < view.nbytes and piece.nbytes:
                part = min(view.nbytes - start, piece.nbytes)
                view[start : start + part] = piece[:part]
                piece, start = piece[part:], start + part
            start -= view.nbytes


class _Table:
    """What is posted, by wire tag, on all links: a driver's thread looks here for each message announced."""

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

    def deliver(self, driver: _Driver, key: int, size: int, probe: _Probe) -> None:
        """On the driver's thread. What nobody wants is received all the same: its sender waits for that."""
        with self.lock:
            receive = self._posted.get(key)
            start = receive.announced if receive is not None else 0
            fits = receive is not None and start + size <= receive.size
            if receive is not None and fits:
                receive.announced += size
                receive.running += 1
            if receive is not None and start + size >= receive.size:
                del self._posted[key]
        if receive is not None and fits:
            receive.link.take(driver, receive, start, size, probe)
            return
        scratch = bytearray(size)
        driver.receive_on_thread(scratch, probe, partial(_let_go, scratch))
        if receive is not None:
            receive.link.fail_on_thread(
                f"message {receive.tag} has more than the {receive.size} bytes posted"
            )


def _let_go(scratch: bytearray, status: int) -> None:
    """Holds the scratch memory until its request is over."""


class ReceivingLink(_UcxLink):
    """Decode's end: receives lie in the table until a message is announced for them."""

    def __init__(self, memory: PageMemory, table: _Table, token: bytes, on_lost: Callable[[], None]) -> None:
        super().__init__(memory, on_lost)
        self._table = table
        self._token = token
        self._mine: dict[int, _Receive] = {}

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

    def take(self, driver: _Driver, receive: _Receive, start: int, size: int, probe: _Probe) -> None:
        """On the driver's thread: a message was matched with ``receive``; get its bytes."""
        if not receive.views:
            receive.views = self._memory.target(receive.blocks)
        place = receive.place(start, size)
        piece = memoryview(bytearray(size)) if place is None else place
        self._started()

        def over(status: int) -> None:
            if place is None and status == _OK:
                receive.scatter(start, piece)
            self._taken(receive, size, status)
            self._finished()

        driver.receive_on_thread(piece, probe, over)

    def _taken(self, receive: _Receive, size: int, status: int) -> None:
        with self._table.lock:
            receive.running -= 1
            receive.landed += size
            receive.failed = receive.failed or status != _OK
            failed, more = receive.failed, receive.running > 0
        if failed:
            if not more:
                self.post(_settle, receive.done, TransferError("the transfer was broken off"))
            if status != _OK:
                self.fail_on_thread(f"a receive ended with ucx status {status}")
        elif receive.landed == receive.size:
            self._memory.landed(receive.blocks, receive.views)
            self.post(_settle, receive.done, None)

    def _fail_idle(self, error: TransferError) -> None:
        for receive in list(self._mine.values()):
            if self._table.withdraw(_wire_tag(self._token, receive.tag), receive, matched_too=True):
                _settle(receive.done, error)


@dataclass(slots=True)
class _Message:
    tag: int
    blocks: tuple[int, ...]
    size: int
    done: asyncio.Future[None]
    running: int = 0
    status: int = _OK


class SendingLink(_UcxLink):
    """Prefill's end: messages wait here and go to UCX as its window allows."""

    def __init__(self, memory: PageMemory, token: bytes, on_lost: Callable[[], None]) -> None:
        super().__init__(memory, on_lost)
        self._token = token
        self._waiting: deque[_Message] = deque()
        self._window = 0
        """Bytes handed to UCX. Of the driver's thread."""

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        if self._closed or self._ended or self._driver is None:
            done.set_exception(TransferError("the link is closed"))
            return done
        self._waiting.append(_Message(tag, tuple(blocks), len(blocks) * self._memory.block_bytes, done))
        self._driver.call(self._pump)
        return done

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        raise TransferError("KV blocks travel from prefill to decode only")

    def cancel_receive(self, tag: int) -> bool:
        return False

    def _pump(self) -> None:
        """On the driver's thread: start what fits into the window, and always one."""
        while self._endpoint is not None and self._waiting:
            if self._window and self._window + self._waiting[0].size > _WINDOW_BYTES:
                return
            self._start(self._endpoint, self._waiting.popleft())

    def _start(self, endpoint: _Endpoint, message: _Message) -> None:
        driver = self._driver
        assert driver is not None
        tag = driver.ucp.UCXXTag(_wire_tag(self._token, message.tag))
        self._window += message.size
        views = self._memory.source(message.blocks)
        message.running = len(views)
        for view in views:
            self._started()
            driver.watch_on_thread(
                endpoint.tag_send(driver.array(view), tag), partial(self._sent, message, view)
            )

    def _sent(self, message: _Message, view: memoryview, status: int) -> None:
        """``view`` was held until here: it may be a copy of a device's pages."""
        message.running -= 1
        message.status = message.status or status
        if message.running == 0:
            self._window -= message.size
            broken = message.status != _OK
            error = TransferError(f"a send ended with ucx status {message.status}") if broken else None
            self.post(_settle, message.done, error)
            if error is not None:
                self.fail_on_thread(str(error))
        self._finished()
        self._pump()

    def _close_endpoint(self) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        for message in waiting:
            self.post(_settle, message.done, TransferError("the link was closed"))
        super()._close_endpoint()

    def _fail_idle(self, error: TransferError) -> None:
        """What waits is the thread's, which fails it when it closes the endpoint."""


class UcxConnector:
    """``Connector`` over UCX. Not encrypted: keep it on a network of your own. UCX's own TCP connections use
    the interfaces of ``UCX_NET_DEVICES``, whatever host is listened on."""

    name = "ucx"
    drained_is_proof = False
    """This process copies, so its own requests' ends are the proof; see the module's text."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """``options``: of UCX, without their prefix ``UCX_``. Raises ImportError without ucxx."""
        extra = dict(options or {})
        self._table = _Table()
        self._expected: dict[bytes, ReceivingLink] = {}
        self._door = Door(_MAGIC, self._expected, self._admitted)
        self._drivers: dict[bytes, _Driver] = {_AM: _Driver(_SCHEMES[_AM], self._table.deliver, extra)}
        self._has_rdma = any(re.match(r"(rc|dc|gga)", name) for name in self._drivers[_AM].transports)
        self._has_cma = "cma" in self._drivers[_AM].transports
        if self._has_cma or self._has_rdma:
            self._drivers[_GET] = _Driver(_SCHEMES[_GET], self._table.deliver, extra)
        self._greetings: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> str:
        return self._door.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        link = _ExpectedLink(memory, self._table, token, on_lost, self._expected)
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, sock: socket.socket) -> None:
        link = self._expected.pop(token)
        task = asyncio.create_task(self._welcome(link, sock))
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
                await link.attach(driver, sock, address)
        except (OSError, TransferError) as error:
            log.warning("a data connection was not made: %s", error or "too slow")
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
        link = SendingLink(memory, token, on_lost)
        sock = await dial(address, _MAGIC, token)
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
                await link.attach(driver, sock, peer)
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
        table: _Table,
        token: bytes,
        on_lost: Callable[[], None],
        expected: dict[bytes, ReceivingLink],
    ) -> None:
        super().__init__(memory, table, token, on_lost)
        self._expected = expected

    async def close(self) -> None:
        self._expected.pop(self._token, None)
        await super().close()


async def _receive_sized(sock: socket.socket) -> bytes:
    (size,) = _SIZE.unpack(await receive_exactly(sock, _SIZE.size))
    return await receive_exactly(sock, size)
