"""The connectors ``nccl`` (CUDA) and ``gloo`` (CPU): a two-rank process group of torch for each link.

Each link has a process group of its own, whose ends find each other over the link's socket
(``baton.transport.torch_store``). There is no default group, so a dead peer concerns one link. Neither
library can withdraw a posted receive, so a receive is posted only when its message is announced: the header
of a message goes over the link's socket, as in ``tcp``, and only then do both ends start its transfers, in
the order of the headers, a few ahead of the one that is awaited. NCCL has no tags and needs that order. The
order also makes cancelling exact: a receive that no message has matched was never given to the library.

The fence: ``close`` breaks off the running transfers and waits for the link's thread. NCCL's communicator is
aborted. Gloo's groups do nothing on ``abort``, but a wait that times out closes the pair's connection, which
ends every other wait except the wait for a message that has arrived in part. So no thread waits for a message
itself: see ``_Gloo``.

Torch is imported when a connector is made: this package must be importable without torch. NCCL takes device
memory only: it reads and writes in place what is contiguous in the pool; the rest is copied through other
memory of the device (``ConnectorSettings.device_staging``). ``nccl`` has not run on a device yet. Two ranks
on one device need differing ``NCCL_HOSTID``.

NCCL's transfers are kernels, which torch puts behind the calling thread's stream, and it puts that stream
behind them. Each pair has streams of its own for that: the stream that computes waits for no transfer, and no
transfer waits for a step. So two workers that send to each other cannot wait for one another either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from baton.net import sockets
from baton.transport.base import (
    ConnectorSettings,
    DeviceStaging,
    DeviceView,
    Link,
    PageMemory,
    TransferError,
)
from baton.transport.data_listener import DataListener, dial
from baton.transport.network_interface import has_library, rdma_ports
from baton.transport.staging import Staging, StagingRoom, pieces
from baton.transport.stream import Stream
from baton.transport.tcp import (
    LOOK_S,
    OutgoingMessage,
    Receive,
    TcpReceivingLink,
    TcpSendingLink,
    connected,
    settle,
    shut_down,
    wait_for_room,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Work

    from baton.transport.torch_store import LinkStore

log = logging.getLogger(__name__)

MAGIC = b"baton-grp-3\n"
MEET_S = 10.0
"""The longest that an end waits for the other's address, and then for its connection, in seconds, even when
the link is closed meanwhile. A host may be busy."""
_GLOO_WAITS = 5
"""Gloo waits this many times its timeout for a connection."""
_LONGEST = timedelta(seconds=30)
"""A piece that takes longer than this ends the link: the library then closes its connection by itself."""
_BREAK_OFF = timedelta(milliseconds=1)
_AHEAD = 16
"""Most transfers that the library has at a time: its own handshake for one passes while another moves."""
_VERBS = "libibverbs.so.1"
"""The library by which NCCL reaches RDMA devices. It looks for it when it makes its first communicator."""
_FORM = struct.Struct("!Q")
_DECODE, _PREFILL = 0, 1
_MESSAGE, _MARK, _RECEIPT, _NEVER = range(4)
"""The tags of Gloo's messages."""


class _PeerToPeer(Protocol):
    """The methods of both kinds of group that torch's stubs leave out."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class _Library(Protocol):
    """One end of a two-rank group. Methods raise RuntimeError (the base of torch's own errors) when the group
    is broken."""

    def send(self, data: Tensor) -> Callable[[], None]:
        """Start a transfer; the result waits for its end."""

    def receive(self, data: Tensor) -> Callable[[], None]: ...

    def break_off(self) -> None:
        """Break the transfers off: bytes that have not moved never will, and waits for them end. Callable
        from any thread."""


class _Nccl:
    """The ``nccl`` end. NCCL itself never gives a transfer up, and torch's watchdog would end the process: a
    transfer that takes too long is broken off here."""

    def __init__(self, meeting: LinkStore, rank: int, device: int | None) -> None:
        import torch
        from torch.distributed import ProcessGroupNCCL

        # Torch would end the process, after a while, because a peer's process has ended.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = ProcessGroupNCCL.Options()
        options._timeout = _LONGEST
        group: object = ProcessGroupNCCL(meeting, rank, 2, options)
        self._group = cast(_PeerToPeer, group)
        self._beginning = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """A stream with nothing on it, behind which transfers are put."""
        self._ending = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """The stream that is put behind transfers."""
        self._over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.waiting_since: float | None = None
        """The time at which the wait for a transfer began, on the monotonic clock."""
        self._broken = ""
        ended = threading.Event()
        weakref.finalize(self, ended.set)
        patience = (weakref.ref(self), ended)
        threading.Thread(target=_break_late, args=patience, name="library-patience", daemon=True).start()
        # The communicator, which takes both ends to make, is made with the first message.
        with torch.cuda.stream(self._beginning):
            first = torch.zeros(1, dtype=torch.uint8, device=f"cuda:{self._beginning.device_index}")
        self._beginning.synchronize()
        (self.receive if rank == _DECODE else self.send)(first)()

    def send(self, data: Tensor) -> Callable[[], None]:
        with self._on(self._beginning):
            return partial(self._wait, self._group.send([data], _DECODE, 0))

    def receive(self, data: Tensor) -> Callable[[], None]:
        with self._on(self._beginning):
            return partial(self._wait, self._group.recv([data], _PREFILL, 0))

    @staticmethod
    def _on(stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[object]:
        import torch

        return torch.cuda.stream(stream)

    def _wait(self, work: Work) -> None:
        """Wait for a transfer. The thread sleeps: given a timeout, torch would look again and again."""
        self.waiting_since = time.monotonic()
        with self._on(self._ending):
            work.wait()  # has the stream wait, not the thread
            self._over.record(self._ending)
        self._over.synchronize()
        self.waiting_since = None
        if self._broken:
            raise RuntimeError(self._broken)

    def break_off(self, why: str = "the transfers were broken off") -> None:
        self._broken = why
        self._group.abort()


def _break_late(library: weakref.ref[_Nccl], ended: threading.Event) -> None:
    """Break the transfers of a library off when one of them takes too long. Runs on a thread of its own, and
    keeps the library for no longer than a look."""
    longest = _LONGEST.total_seconds()
    while not ended.wait(longest / 4):
        looked_at = library()
        if looked_at is None:
            return
        since = looked_at.waiting_since
        if since is not None and time.monotonic() - since > longest:
            looked_at.break_off(f"a piece took longer than {longest:.0f} s")
            return
        del looked_at


class _Gloo:
    """The ``gloo`` end, which sends a mark of one byte behind each message and gets a receipt back. The mark
    is sent only when the message is through, as both ends ask for the message first. So a wait for a mark or
    a receipt is a wait for a message of which no byte has come yet, and Gloo ends it at once when the
    connection ends."""

    def __init__(self, meeting: LinkStore, rank: int, host: str) -> None:
        import torch
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=MEET_S / _GLOO_WAITS)
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        group: object = ProcessGroupGloo(meeting, rank, 2, options)
        self._group = cast(_PeerToPeer, group)
        self._peer = _DECODE + _PREFILL - rank
        self._byte = torch.zeros(1, dtype=torch.uint8)
        self._receipts: deque[Work] = deque(maxlen=2 * _AHEAD)
        """Receipts on their way. The peer has a receipt that falls out: it never waits for more than
        ``_AHEAD``."""

    def send(self, data: Tensor) -> Callable[[], None]:
        message = self._group.send([data], _DECODE, _MESSAGE)
        mark = self._group.send([self._byte], _DECODE, _MARK)
        receipt = self._group.recv([self._byte], _DECODE, _RECEIPT)

        def wait() -> None:
            receipt.wait(_LONGEST)
            message.wait(_LONGEST)
            mark.wait(_LONGEST)

        return wait

    def receive(self, data: Tensor) -> Callable[[], None]:
        message = self._group.recv([data], _PREFILL, _MESSAGE)
        mark = self._group.recv([self._byte], _PREFILL, _MARK)

        def wait() -> None:
            mark.wait(_LONGEST)
            message.wait(_LONGEST)
            self._receipts.append(self._group.send([self._byte], _PREFILL, _RECEIPT))

        return wait

    def break_off(self) -> None:
        with contextlib.suppress(RuntimeError):  # the error is what breaks the pair
            self._group.recv([self._byte], self._peer, _NEVER).wait(_BREAK_OFF)


@dataclass(slots=True, eq=False)
class _Transfer:
    wait: Callable[[], None]
    data: Tensor
    over: Callable[[bool], None]


class _Pair:
    """One end of a link's group: transfers in order, started by the link's thread.

    A thread of the pair's own waits for the library.

    A transfer's ``over(ok)`` is called once: with True, on the pair's thread, when its bytes have arrived or
    left; with False if they never will and the library does not touch their memory any more.
    """

    def __init__(self, backend: str, rank: int, device: int | None, sock: socket.socket) -> None:
        from baton.transport.torch_store import LinkStore

        self._on_cuda = backend == "nccl"
        self._meeting = LinkStore(sock, MEET_S)
        """The store, kept because the library may come back to it."""
        host = sockets.own_host(sock)
        self._library: _Library = (
            _Nccl(self._meeting, rank, device) if self._on_cuda else _Gloo(self._meeting, rank, host)
        )
        self._meeting.leave()
        self._changed = threading.Condition()
        self._running: deque[_Transfer] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._awaited: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()

    def begin(self, failed: Callable[[], None]) -> None:
        """Start the waiting thread, which calls ``failed`` when a transfer failed; ``check`` then says
        why."""
        threading.Thread(target=self._wait, args=(failed,), name="library-wait", daemon=True).start()

    @property
    def takes_device_memory(self) -> bool:
        return self._on_cuda

    def send(
        self, memory: memoryview | DeviceView, over: Callable[[bool], None], alive: Callable[[], bool]
    ) -> None:
        from baton.transport.piece_bytes import byte_tensor

        self._start(self._library.send, byte_tensor(memory), over, alive)

    def receive(
        self, memory: memoryview | DeviceView, over: Callable[[bool], None], alive: Callable[[], bool]
    ) -> None:
        from baton.transport.piece_bytes import byte_tensor

        self._start(self._library.receive, byte_tensor(memory), over, alive)

    def _start(
        self,
        start: Callable[[Tensor], Callable[[], None]],
        data: Tensor,
        over: Callable[[bool], None],
        alive: Callable[[], bool],
    ) -> None:
        with self._changed:
            try:
                while not self._changed.wait_for(self._may_go_on, LOOK_S):
                    if not alive():
                        raise TransferError("the connection has ended")
                self.check()
                transfer = _Transfer(_started(start, data), data, over)
            except BaseException:
                over(False)
                raise
            self._running.append(transfer)
        self._awaited.put(transfer)

    def _may_go_on(self) -> bool:
        return self._ended or self._error is not None or len(self._running) < _AHEAD

    def check(self) -> None:
        """Raise the error of an earlier transfer, or of the link."""
        if self._error is not None:
            raise self._error
        if self._ended:
            raise TransferError("the link was closed")

    def _wait(self, failed: Callable[[], None]) -> None:
        while (transfer := self._awaited.get()) is not None:
            error = _outcome(transfer.wait)
            with self._changed:
                if self._ended:
                    return
                self._error = error or self._take_out(transfer)
                self._changed.notify_all()
            if self._error is not None:
                failed()
                return

    def _take_out(self, transfer: _Transfer) -> Exception | None:
        self._running.remove(transfer)
        try:
            transfer.over(True)
        except Exception as error:  # noqa: BLE001 (``check`` raises it on the link's thread)
            return error
        return None

    def abort(self) -> None:
        """Start and complete nothing more; callable from any thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def end(self) -> None:
        """Break the running transfers off. When this returns, the library moves no byte: it has closed its
        connection, or had nothing left to move."""
        self.abort()
        self._awaited.put(None)
        if self._running:
            self._library.break_off()
        while self._running:
            self._running.popleft().over(False)
        with self._changed:
            self._error = None  # the traceback refers to this pair, and would keep the library's threads


def _started(start: Callable[[Tensor], Callable[[], None]], data: Tensor) -> Callable[[], None]:
    try:
        return start(data)
    except RuntimeError as error:
        raise TransferError(str(error)) from error


def _outcome(wait: Callable[[], None]) -> Exception | None:
    try:
        wait()
    except RuntimeError as error:
        return TransferError(str(error))
    return None


def _views(memory: PageMemory, blocks: Sequence[int], pair: _Pair) -> Sequence[memoryview | DeviceView]:
    """Return the memory of these blocks that the library reads or writes by itself."""
    return memory.in_place(blocks) or (memory.on_device(blocks) if pair.takes_device_memory else [])


MakePair = Callable[[socket.socket], _Pair]


Piece = memoryview | DeviceView
"""Memory for a piece, of the kind that the library takes."""


def _read_form(stream: Stream) -> int:
    """Read the size of a message's blocks, which stands behind its header: also a message that goes nowhere
    must be taken in the pieces in which it was sent."""
    form = memoryview(bytearray(_FORM.size))
    stream.read_into([form])
    (block_bytes,) = _FORM.unpack(form)
    return int(block_bytes)


class _GroupReceivingLink(TcpReceivingLink):
    _pair: _Pair | None = None
    make_pair: MakePair
    pieces: StagingRoom[Piece]

    def _run(self, stream: Stream) -> None:
        self._pair = _made(self.make_pair, stream.sock)
        try:
            with _running(self._pair, stream.sock):
                super()._run(stream)
        finally:
            self._pair = None  # closes what the library has open

    def _take(self, stream: Stream, receive: Receive) -> None:
        assert self._pair is not None
        sock, missing = stream.sock, len(receive.blocks)
        form = self._memory.form_of(receive.blocks)
        if _read_form(stream) != form.nbytes:
            raise TransferError(f"a message has blocks of other sizes than {form.nbytes} bytes")
        for blocks in pieces(receive.blocks, form.nbytes, self.pieces.piece_bytes, form.names):
            missing -= len(blocks)
            views = _views(self._memory, blocks, self._pair)
            staged = None if len(views) == 1 else self._take_piece(sock, form.size_of(blocks))
            over = partial(self._landed, receive if missing == 0 else None, blocks, staged)
            self._pair.receive(staged or views[0], over, partial(connected, sock))

    def _take_piece(self, sock: socket.socket, size: int) -> Piece:
        return wait_for_room(self.pieces, size, self._room_freed, sock)

    def _landed(
        self, complete: Receive | None, blocks: Sequence[int], staged: Piece | None, ok: bool
    ) -> None:
        if staged is not None:
            if ok:
                self._memory.scatter(blocks, staged)
            self.pieces.give_back(staged)
        if ok and complete is not None:
            self._complete(complete)

    def _discard(self, stream: Stream, size: int) -> None:
        """Take a message that was cancelled into no blocks, in the same pieces as it was sent."""
        assert self._pair is not None
        block_bytes = _read_form(stream)
        if not block_bytes or size % block_bytes:
            raise TransferError(f"a message has {size} bytes, no multiple of {block_bytes}")
        for blocks in pieces(range(size // block_bytes), block_bytes, self.pieces.piece_bytes):
            scratch = self._take_piece(stream.sock, len(blocks) * block_bytes)
            self._pair.receive(scratch, partial(self._let_go, scratch), partial(connected, stream.sock))

    def _let_go(self, scratch: Piece, ok: bool) -> None:
        self.pieces.give_back(scratch)

    def _wake(self) -> None:
        super()._wake()
        pair = self._pair
        if pair is not None:
            pair.abort()


class _GroupSendingLink(TcpSendingLink):
    _pair: _Pair | None = None

    def __init__(
        self,
        memory: PageMemory,
        room: StagingRoom[memoryview],
        stream: Stream,
        on_lost: Callable[[], None],
        on_crash: Callable[[], None],
        make_pair: MakePair,
        pieces: StagingRoom[Piece],
    ) -> None:
        self._make_pair = make_pair
        self._pieces = pieces
        super().__init__(memory, room, stream, on_lost, on_crash)

    def _watch(self, sock: socket.socket) -> None:
        """Watch nothing yet: decode writes to the socket until both ends have set their group up."""

    def _run(self, stream: Stream) -> None:
        self._pair = _made(self._make_pair, stream.sock)
        try:
            self._have_watched(stream.sock)
            with _running(self._pair, stream.sock):
                super()._run(stream)
        finally:
            self._pair = None  # closes what the library has open

    def _have_watched(self, sock: socket.socket) -> None:
        """Watch the socket before anything is sent: once the event loop watches it, it is set to block
        again."""
        watched = threading.Event()

        def watch() -> None:
            if not self._closed:
                super(_GroupSendingLink, self)._watch(sock)
            watched.set()

        self._post(watch)
        while not watched.wait(LOOK_S):
            if not connected(sock):
                raise TransferError("the connection has ended")

    def _put(self, stream: Stream, message: OutgoingMessage) -> None:
        assert self._pair is not None
        form, room = self._memory.form_of(message.blocks), self._pieces
        stream.write([self._header(message), memoryview(_FORM.pack(form.nbytes))])
        sock, missing = stream.sock, len(message.blocks)
        for blocks in pieces(message.blocks, form.nbytes, room.piece_bytes, form.names):
            missing -= len(blocks)
            views = _views(self._memory, blocks, self._pair)
            staged = None
            if len(views) != 1:
                staged = wait_for_room(room, form.size_of(blocks), self._room_freed, sock)
            if staged is not None:
                self._memory.gather(blocks, staged)
            over = partial(self._sent, message if missing == 0 else None, staged)
            self._pair.send(staged or views[0], over, partial(connected, sock))

    def _sent(self, complete: OutgoingMessage | None, staged: Piece | None, ok: bool) -> None:
        if staged is not None:
            self._pieces.give_back(staged)
        if ok and complete is not None:
            self._post(settle, complete.done, None)

    def _wake(self) -> None:
        super()._wake()
        pair = self._pair
        if pair is not None:
            pair.abort()


@contextlib.contextmanager
def _running(pair: _Pair, sock: socket.socket) -> Iterator[None]:
    """Run a pair on the link's thread. Leaving this context is the fence."""
    pair.begin(partial(shut_down, sock))
    try:
        yield
    except (OSError, TransferError):
        pair.check()  # of two errors, the library's says more than the socket's
        raise
    finally:
        pair.end()


def _made(make_pair: MakePair, sock: socket.socket) -> _Pair:
    """Make a pair on a thread, as a library that waits for its peer cannot be told to stop. When the link has
    ended, which must not take long, that thread is left to its timeout, and a pair that it makes after all is
    closed for want of an owner."""
    made: Future[_Pair] = Future()

    def make() -> None:
        try:
            made.set_result(make_pair(sock))
        except (RuntimeError, OSError, TransferError) as error:  # torch's own errors are RuntimeErrors
            # The new error does not refer to where the first was raised: the library's threads are there.
            made.set_exception(TransferError(f"no process group: {error}"))
        except Exception as error:  # noqa: BLE001 (the link's thread gets it)
            made.set_exception(error)

    threading.Thread(target=make, name="library-meet", daemon=True).start()
    while connected(sock):
        try:
            return made.result(LOOK_S)
        except TimeoutError:
            continue
    raise TransferError("the connection has ended")


class GroupConnector:
    """``Connector`` over torch's process groups. Not encrypted: keep it on a network of your own."""

    drained_is_proof = False

    def __init__(
        self,
        backend: str,
        staging: Staging,
        on_crash: Callable[[], None],
        device: int | None = None,
        device_staging: DeviceStaging | None = None,
    ) -> None:
        """``backend``: nccl or gloo. ``on_crash`` ends the worker: an unexpected error on a thread leaves
        pages pinned for ever. ``device``: the CUDA device of nccl, which its threads cannot find by
        themselves; ``device_staging``: room there, without which what is not contiguous cannot be moved."""
        self.name = backend
        self._device = device
        self._staging = staging
        self._pieces: Staging | DeviceStaging = device_staging or staging
        self._on_crash = on_crash
        self._expected: dict[bytes, _GroupReceivingLink] = {}
        self._listener = DataListener(MAGIC, self._expected, self._admitted)

    @property
    def missing_for_rdma(self) -> str:
        if self.name != "nccl":
            return "gloo never has"
        if not rdma_ports():
            return "this host shows no RDMA device"
        return "" if has_library(_VERBS) else f"NCCL finds no {_VERBS}"

    async def listen(self, host: str, port: int) -> str:
        return self._listener.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        def forget() -> None:
            self._expected.pop(token, None)

        link = _GroupReceivingLink(memory, self._staging.receiving, on_lost, self._on_crash, forget)
        link.make_pair = partial(_Pair, self.name, _DECODE, self._device)
        link.pieces = self._pieces.receiving
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, stream: Stream) -> None:
        stream.sock.setblocking(True)
        self._expected.pop(token).attach(stream)

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        stream = await dial(address, MAGIC, token)
        stream.sock.setblocking(True)
        make_pair = partial(_Pair, self.name, _PREFILL, self._device)
        room = self._staging.sending
        pieces = self._pieces.sending
        return _GroupSendingLink(memory, room, stream, on_lost, self._on_crash, make_pair, pieces)

    async def close(self) -> None:
        await self._listener.close()


def nccl(settings: ConnectorSettings) -> GroupConnector:
    return GroupConnector(
        "nccl", settings.staging, settings.on_crash, settings.device, settings.device_staging
    )


def gloo(settings: ConnectorSettings) -> GroupConnector:
    return GroupConnector("gloo", settings.staging, settings.on_crash)
