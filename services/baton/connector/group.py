"""The connectors ``nccl`` (CUDA) and ``gloo`` (CPU): a two-rank process group of torch for each link.

The group is the link's own, and its ends meet over the link's socket (``baton.connector.meeting``): there is
no default group, so one dead peer concerns one link. Neither library can withdraw a posted receive, so none
is posted before its message is announced: the header of a message goes over the link's socket, as in ``tcp``,
and only then do both ends start its transfers, in the order of the headers, a few ahead of the one that is
awaited. NCCL has no tags and needs that order, and it makes cancelling exact: what nothing has matched was
never given to the library.

The fence: ``close`` breaks off the running transfers and waits for the link's thread. NCCL's communicator is
aborted. Gloo's groups do nothing on ``abort``, but a wait that times out closes the pair's connection, and
that ends all other waits but the one for a message that has arrived in part. So nobody waits for a message:
see ``_Gloo``.

Torch is imported when a connector is made: this package must be importable without. NCCL takes device memory
only: what is contiguous in the pool it reads and writes there, and the rest goes through host memory and is
copied. ``nccl`` has not run on a device yet. Two ranks on one device need differing ``NCCL_HOSTID``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from baton import sockets
from baton.connector.door import Door, dial
from baton.connector.staging import Room, Staging, pieces
from baton.connector.stream import Stream
from baton.connector.tcp import (
    LOOK_S,
    Message,
    Receive,
    ReceivingLink,
    SendingLink,
    connected,
    settle,
    shut_down,
)
from baton.connector.transport import DeviceView, Link, PageMemory, TransferError

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Work

    from baton.connector.meeting import Meeting

log = logging.getLogger(__name__)

MAGIC = b"baton-grp-2\n"
MEET_S = 10.0
"""The longest that an end waits for the other's address, and after it for its connection, be the link closed
or not. A host may be busy."""
_GLOO_WAITS = 5
"""Gloo waits this many times its timeout for a connection."""
_LONGEST = timedelta(seconds=30)
"""A piece that takes longer than this ends the link: the library then closes its connection by itself."""
_BREAK_OFF = timedelta(milliseconds=1)
_AHEAD = 16
"""Transfers that the library has at a time: its own handshake for one passes while another moves."""
_DECODE, _PREFILL = 0, 1
_MESSAGE, _MARK, _RECEIPT, _NEVER = range(4)
"""Gloo's tags."""


class _PeerToPeer(Protocol):
    """What both kinds of group have, which torch's stubs leave out."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class _Library(Protocol):
    """One end of a two-rank group. RuntimeError (torch's own errors derive from it) when it is broken."""

    def send(self, data: Tensor) -> Callable[[], None]:
        """Start a transfer; the result waits for its end."""

    def receive(self, data: Tensor) -> Callable[[], None]: ...

    def break_off(self) -> None:
        """What has not moved never will, and waits for it end; from any thread."""


class _Nccl:
    def __init__(self, meeting: Meeting, rank: int, device: int | None) -> None:
        import torch
        from torch.distributed import ProcessGroupNCCL

        self._device = device

        options = ProcessGroupNCCL.Options()
        options._timeout = _LONGEST
        group: object = ProcessGroupNCCL(meeting, rank, 2, options)
        self._group = cast(_PeerToPeer, group)
        # Its communicator, for which the two have to meet, is made for the first message.
        first = torch.zeros(1, dtype=torch.uint8).cuda(device)
        (self.receive if rank == _DECODE else self.send)(first)()

    def send(self, data: Tensor) -> Callable[[], None]:
        return partial(self._wait, self._group.send([data], _DECODE, 0))

    def receive(self, data: Tensor) -> Callable[[], None]:
        return partial(self._wait, self._group.recv([data], _PREFILL, 0))

    def _wait(self, work: Work) -> None:
        import torch

        work.wait(_LONGEST)
        torch.cuda.current_stream(self._device).synchronize()

    def break_off(self) -> None:
        self._group.abort()


class _Gloo:
    """Behind each message goes a mark of one byte, and back comes a receipt. The mark is not sent before the
    message is through, as both ends ask for the message first. So whoever waits for mark or receipt waits
    for something of which nothing has come yet, and is told at once when the connection ends.
    """

    def __init__(self, meeting: Meeting, rank: int, host: str) -> None:
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
        """On their way. The peer has the one that falls out: it never waits for more than ``_AHEAD``."""

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
        with contextlib.suppress(RuntimeError):  # it is what breaks the pair
            self._group.recv([self._byte], self._peer, _NEVER).wait(_BREAK_OFF)


@dataclass(slots=True, eq=False)
class _Transfer:
    wait: Callable[[], None]
    data: Tensor
    over: Callable[[bool], None]


class _Pair:
    """One end of a link's group: transfers in order, which the link's thread starts.

    The library is waited for on a thread of its own.

    A transfer's ``over(ok)`` is called once: with True, on that other thread, when its bytes have arrived or
    left, and with False if they never will and the library does not touch their memory any more.
    """

    def __init__(self, backend: str, rank: int, device: int | None, sock: socket.socket) -> None:
        from baton.connector.meeting import Meeting

        self._on_cuda = backend == "nccl"
        self._device = device
        self._meeting = Meeting(sock, MEET_S)
        """The library may come back to it."""
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
        """``failed`` is called on the other thread when a transfer failed; ``check`` then says why."""
        threading.Thread(target=self._wait, args=(failed,), name="library-wait", daemon=True).start()

    @property
    def takes_device_memory(self) -> bool:
        return self._on_cuda

    def send(
        self, memory: memoryview | DeviceView, over: Callable[[bool], None], alive: Callable[[], bool]
    ) -> None:
        data = self._place(memory)
        self._start(self._library.send, data, over, alive)

    def receive(
        self, memory: memoryview | DeviceView, over: Callable[[bool], None], alive: Callable[[], bool]
    ) -> None:
        data = self._place(memory)
        copied = _tensor(memory) if self._on_cuda and isinstance(memory, memoryview) else None

        def landed(ok: bool) -> None:  # does not refer to this pair: transfers may be left over in it
            if ok and copied is not None:
                copied.copy_(data)
            over(ok)

        self._start(self._library.receive, data, landed, alive)

    def _place(self, memory: memoryview | DeviceView) -> Tensor:
        if isinstance(memory, DeviceView):
            return _device_tensor(memory)
        return _tensor(memory).cuda(self._device) if self._on_cuda else _tensor(memory)

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
        """Raise what became of an earlier transfer, or of the link."""
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
        """Nothing more is started or completed; from any thread."""
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
            self._error = (
                None  # where it was raised refers to this pair, and would keep the library's threads
            )


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


def _tensor(memory: memoryview) -> Tensor:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8)


def _device_tensor(view: DeviceView) -> Tensor:
    """The pool's own bytes."""
    import torch

    return torch.as_tensor(view, device=f"cuda:{view.device}")


def _views(memory: PageMemory, blocks: Sequence[int], pair: _Pair) -> Sequence[memoryview | DeviceView]:
    """Where the library finds these blocks by itself."""
    return memory.in_place(blocks) or (memory.on_device(blocks) if pair.takes_device_memory else [])


MakePair = Callable[[socket.socket], _Pair]


class _GroupReceivingLink(ReceivingLink):
    _pair: _Pair | None = None
    make_pair: MakePair

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
        for blocks in pieces(receive.blocks, self._memory.block_bytes):
            missing -= len(blocks)
            views = _views(self._memory, blocks, self._pair)
            staged = None if len(views) == 1 else self._take_room(sock, len(blocks))
            over = partial(self._landed, receive if missing == 0 else None, blocks, staged)
            self._pair.receive(staged or views[0], over, partial(connected, sock))

    def _landed(
        self, complete: Receive | None, blocks: Sequence[int], staged: memoryview | None, ok: bool
    ) -> None:
        if staged is not None:
            if ok:
                self._memory.scatter(blocks, staged)
            self._room.give_back(staged)
        if ok and complete is not None:
            self._complete(complete)

    def _discard(self, stream: Stream, size: int) -> None:
        """The library is to take it in the same pieces as it was sent."""
        assert self._pair is not None
        count, odd = divmod(size, self._memory.block_bytes)
        if odd:
            raise TransferError(f"a message has {size} bytes, no multiple of {self._memory.block_bytes}")
        for blocks in pieces(range(count), self._memory.block_bytes):
            scratch = self._take_room(stream.sock, len(blocks))
            self._pair.receive(scratch, partial(self._let_go, scratch), partial(connected, stream.sock))

    def _let_go(self, scratch: memoryview, ok: bool) -> None:
        self._room.give_back(scratch)

    def _wake(self) -> None:
        super()._wake()
        pair = self._pair
        if pair is not None:
            pair.abort()


class _GroupSendingLink(SendingLink):
    _pair: _Pair | None = None

    def __init__(
        self,
        memory: PageMemory,
        room: Room,
        stream: Stream,
        on_lost: Callable[[], None],
        on_crash: Callable[[], None],
        make_pair: MakePair,
    ) -> None:
        self._make_pair = make_pair
        super().__init__(memory, room, stream, on_lost, on_crash)

    def _watch(self, sock: socket.socket) -> None:
        """Not yet: decode writes here until both have met."""

    def _run(self, stream: Stream) -> None:
        self._pair = _made(self._make_pair, stream.sock)
        try:
            self._have_watched(stream.sock)
            with _running(self._pair, stream.sock):
                super()._run(stream)
        finally:
            self._pair = None  # closes what the library has open

    def _have_watched(self, sock: socket.socket) -> None:
        """Nothing is sent before: what the loop begins to watch may not block for a moment."""
        watched = threading.Event()

        def watch() -> None:
            if not self._closed:
                super(_GroupSendingLink, self)._watch(sock)
            watched.set()

        self._post(watch)
        while not watched.wait(LOOK_S):
            if not connected(sock):
                raise TransferError("the connection has ended")

    def _put(self, stream: Stream, message: Message) -> None:
        assert self._pair is not None
        stream.write([self._header(message)])
        sock, missing = stream.sock, len(message.blocks)
        for blocks in pieces(message.blocks, self._memory.block_bytes):
            missing -= len(blocks)
            views = _views(self._memory, blocks, self._pair)
            staged = None if len(views) == 1 else self._take_room(sock, len(blocks))
            if staged is not None:
                self._memory.gather(blocks, staged)
            over = partial(self._sent, message if missing == 0 else None, staged)
            self._pair.send(staged or views[0], over, partial(connected, sock))

    def _sent(self, complete: Message | None, staged: memoryview | None, ok: bool) -> None:
        if staged is not None:
            self._room.give_back(staged)
        if ok and complete is not None:
            self._post(settle, complete.done, None)

    def _wake(self) -> None:
        super()._wake()
        pair = self._pair
        if pair is not None:
            pair.abort()


@contextlib.contextmanager
def _running(pair: _Pair, sock: socket.socket) -> Iterator[None]:
    """A pair at work, for the link's thread. Leaving this is the fence."""
    pair.begin(partial(shut_down, sock))
    try:
        yield
    except (OSError, TransferError):
        pair.check()  # of two errors, the library's says more than that of the socket
        raise
    finally:
        pair.end()


def _made(make_pair: MakePair, sock: socket.socket) -> _Pair:
    """A library that waits for its peer cannot be told to stop. When the link has ended, which must not take
    long, it is left to its timeout, and a pair that comes after all is closed for want of an owner."""
    made: Future[_Pair] = Future()

    def make() -> None:
        try:
            made.set_result(make_pair(sock))
        except (RuntimeError, OSError, TransferError) as error:  # torch's own errors derive from the first
            # A new one, which does not refer to where it was raised: the library's threads are there.
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
        self, backend: str, staging: Staging, on_crash: Callable[[], None], device: int | None = None
    ) -> None:
        """``backend``: nccl or gloo. ``on_crash`` ends the worker: what a thread met leaves pages pinned for
        ever. ``device``: that of nccl, on which its threads would not find themselves."""
        self.name = backend
        self._device = device
        self._staging = staging
        self._on_crash = on_crash
        self._expected: dict[bytes, _GroupReceivingLink] = {}
        self._door = Door(MAGIC, self._expected, self._admitted)

    async def listen(self, host: str, port: int) -> str:
        return self._door.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        def forget() -> None:
            self._expected.pop(token, None)

        link = _GroupReceivingLink(memory, self._staging.receiving, on_lost, self._on_crash, forget)
        link.make_pair = partial(_Pair, self.name, _DECODE, self._device)
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
        return _GroupSendingLink(memory, room, stream, on_lost, self._on_crash, make_pair)

    async def close(self) -> None:
        await self._door.close()
