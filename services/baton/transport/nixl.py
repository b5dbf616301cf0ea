"""The ``nixl`` connector: RDMA, NVLink or TCP through NVIDIA's NIXL (``nixl-cu13``, the extra ``nixl``).

Prefill *writes* into decode's pages, and a notification follows the bytes. Nobody writes unasked: on the
link's socket prefill announces a message, decode looks its tag up among the posted receives, and answers with
the addresses of its pages (``nixl_frames``). A receive that no message has matched is an entry in a table of
this process, so cancelling it is exact, and a message that was cancelled or never posted is refused. While
one message moves, the next ones are announced already.

**When a message is over.** NIXL flushes a write before it reports its end and notifies the peer, so that the
bytes are in decode's memory by then. NIXL's notifications can only be polled: prefill says on the socket that
one is due, and decode looks for it then. When all of a message has come, and been copied to its pages where
that is needed, decode says so, and only that ends the send: prefill's ``Drained`` proves that nothing of its
attempt is still to land.

**The fence.** NIXL cannot cancel a write, and to release one proves nothing (``nixl_agent``). Each end of a
link has an agent of its own, and ``close`` ends it: what the peer still has on the way finds no connection
and no registered memory. Where the peer may write by itself (a pool on a CUDA device, or cross-memory attach
that ``UCX_TLS`` allows) the end of our agent does not stop it, and ``close`` also waits until the peer has
closed the socket, which it does once its own agent has ended, or its process. If it hangs, ``close`` does not
return, and the worker retires rather than reuse the pages.

**Pieces.** A message moves from pages to pages if its blocks are contiguous at both ends, as one write.
Otherwise it goes by way of staging memory, piece by piece, registered with the link's agent when it is first
used; a piece is announced by its place as soon as there is room.

Each end has one thread, as in ``tcp``, and NIXL one for each agent. The bytes are not encrypted: keep this
on a network of your own. A pool on a device, and RDMA, have not been run yet.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.transport.base import (
    ConnectorMissingError,
    ConnectorSettings,
    DeviceView,
    Link,
    PageMemory,
    TransferError,
)
from baton.transport.data_listener import DataListener, dial
from baton.transport.network_interface import rdma_ports
from baton.transport.nixl_agent import (
    AgentFactory,
    NixlAgent,
    kind_of,
    span_of,
)
from baton.transport.nixl_frames import Frame, FrameKind, Notice, cut, paired, read_frame, send_frame
from baton.transport.staging import PIECE_BYTES, Staging, StagingRoom, heap, piece_blocks
from baton.transport.stream import Stream
from baton.transport.tcp import OutgoingMessage, Receive, TcpReceivingLink, TcpSendingLink, settle
from baton.transport.ucx_driver import interface_options

if TYPE_CHECKING:
    import asyncio

_MAGIC = b"baton-nxl-1\n"
_LOOK_S = 0.0002
"""The time between two looks at a write that runs, or for a notification that is due, in seconds."""
_WINDOW = 64
"""Most messages of a link that are announced and not over. It bounds what lies unread in the sockets."""
_MAX_WRITES = 16
_MAX_SLABS = 64
"""Most buffers of staging memory that a link registers. They are kept, and a worker has eight for each
direction, unless blocks larger than a piece have it drop them."""


class _Bell:
    """Wakes a link's thread from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def heard(self, sock: socket.socket, *, wait: bool) -> bool:
        """Return whether the socket has something to read; with ``wait``, wait for that or for a ring."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        ready = {number for number, _ in poll.poll(None if wait else 0)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return sock.fileno() in ready

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._wake)


@dataclass(slots=True, eq=False)
class _Lease:
    """Staging memory for one piece."""

    held: memoryview
    """What the worker's room is to get back."""
    memory: memoryview
    """What NIXL knows of; ``held``, unless that is larger than a piece."""


class _RegisteredRoom:
    """A worker's room for pieces, as one link uses it: with memory that its agent has registered."""

    def __init__(self, room: StagingRoom[memoryview], agent: NixlAgent, on_free: Callable[[], None]) -> None:
        self._room = room
        self._agent = agent
        self._on_free = on_free
        self._slabs: set[int] = set()
        self._large: memoryview | None = None
        """Memory for one block that is larger than a piece, kept because the worker's room makes it anew each
        time."""
        self._leases: set[_Lease] = set()
        self.untold: list[bytes] = []
        """What the peer must be told before it writes to the memory leased since."""

    def take(self, size: int) -> _Lease | None:
        """Return memory for a piece; None if there is no room now: ``on_free`` is called once there may be
        some."""
        large = size > PIECE_BYTES
        if large and self._leases:
            return None  # the link's own give_back has it look again
        held = self._room.take(size, self._on_free)
        if held is None:
            return None
        if large and self._large is None:
            self._large = heap(size)
        memory = held if self._large is None or not large else self._large
        lease = _Lease(held, memory[:size])
        self._leases.add(lease)
        self._register(memoryview(memory.obj))
        return lease

    def _register(self, slab: memoryview) -> None:
        address = span_of(slab).address
        if address in self._slabs:
            return
        if len(self._slabs) == _MAX_SLABS:
            raise TransferError(f"the link has registered {_MAX_SLABS} buffers, and is made again")
        self.untold.append(self._agent.register(slab))
        self._slabs.add(address)

    def give_back(self, lease: _Lease) -> None:
        self._leases.remove(lease)
        self._room.give_back(lease.held)

    def close(self) -> None:
        for lease in list(self._leases):
            self.give_back(lease)


def _views(memory: PageMemory, blocks: Sequence[int]) -> Sequence[memoryview | DeviceView]:
    return memory.in_place(blocks) or memory.on_device(blocks)


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a message that prefill has been given a place for."""

    offset: int
    length: int
    blocks: Sequence[int]
    lease: _Lease | None
    """The staging memory that they come to; None: they come to their pages."""
    landed: int = 0


@dataclass(slots=True, eq=False)
class _Arrival:
    """A message that was matched."""

    tag: int
    receive: Receive
    size: int
    placed: int = 0
    landed: int = 0
    pieces: list[_Piece] = field(default_factory=list)


class NixlReceivingLink(TcpReceivingLink):
    """Decode's end: says where bytes go, and finds out when they are there."""

    _bell: _Bell | None = None

    def __init__(
        self,
        memory: PageMemory,
        room: StagingRoom[memoryview],
        on_lost: Callable[[], None],
        on_crash: Callable[[], None],
        on_closed: Callable[[], None],
        agents: AgentFactory,
    ) -> None:
        super().__init__(memory, room, on_lost, on_crash, on_closed)
        self._agents = agents
        self._whole = memory.whole()
        self._peer_writes = isinstance(self._whole, DeviceView) or agents.peer_may_copy
        """Whether the peer may write to the pages by itself, so that only its end is the end of that."""
        self._arrivals: dict[int, _Arrival] = {}
        self._unplaced: deque[_Arrival] = deque()
        self._due = 0
        """Notices that the peer has said to be due, less those that have come."""

    async def close(self) -> None:
        if self._peer_writes and self._stream is not None and not self._closed:
            self._on_closed()
            self._closed = True
            _end_writing(self._stream.sock)
            self._wake()
            await self._over.wait()
        await super().close()

    def _wake(self) -> None:
        super()._wake()
        if self._bell is not None:
            self._bell.ring()

    def _run(self, stream: Stream) -> None:
        sock = stream.sock
        with contextlib.ExitStack() as fence:  # left from its end to its start
            self._bell = fence.enter_context(contextlib.closing(_Bell()))
            agent = self._agents.make()
            room = _RegisteredRoom(self._room, agent, self._bell.ring)
            fence.callback(room.close)
            if self._peer_writes:
                fence.callback(self._until_gone, sock)
            fence.callback(agent.close)
            if self._whole is not None:
                send_frame(sock, Frame(FrameKind.METADATA, metadata=agent.register(self._whole)))
            while not self._closed:
                self._turn(sock, self._bell, agent, room)

    def _until_gone(self, sock: socket.socket) -> None:
        """Wait until the peer has closed its end, in order or by its death."""
        self._post(self._lose)
        _end_writing(sock)
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                continue

    def _lose(self) -> None:
        """Tell of a link that ended by itself before its fence is complete, which may take for ever."""
        if not self._closed:
            on_lost, self._on_lost = self._on_lost, _nothing
            on_lost()

    def _turn(self, sock: socket.socket, bell: _Bell, agent: NixlAgent, room: _RegisteredRoom) -> None:
        if bell.heard(sock, wait=self._due <= 0):
            self._hear(sock)
        elif self._due > 0:
            time.sleep(_LOOK_S)
        for notice in agent.notices():
            self._note(sock, Notice.of(notice), room)
        while self._unplaced and self._place(sock, self._unplaced[0], room):
            if self._unplaced[0].placed == self._unplaced[0].size:
                self._unplaced.popleft()

    def _hear(self, sock: socket.socket) -> None:
        frame = read_frame(sock, (FrameKind.ANNOUNCE, FrameKind.WRITTEN))
        if frame.kind == FrameKind.WRITTEN:
            self._due += 1
            return
        if frame.tag in self._arrivals:
            raise TransferError(f"message {frame.tag} came twice")
        receive = self._match(frame.tag, frame.length)
        if receive is None:  # cancelled: the sender announced it before it heard of the cancel
            send_frame(sock, Frame(FrameKind.REFUSED, frame.tag))
            return
        arrival = self._arrivals[frame.tag] = _Arrival(frame.tag, receive, frame.length)
        self._unplaced.append(arrival)

    def _place(self, sock: socket.socket, arrival: _Arrival, room: _RegisteredRoom) -> bool:
        """Say where the next bytes of a message go: all of them to its pages, or a piece to staging memory.
        False: there is no room."""
        blocks: Sequence[int] = arrival.receive.blocks
        form, lease = self._memory.form_of(blocks), None
        if self._whole is None:
            first = arrival.placed // form.nbytes
            blocks = blocks[first * form.names : (first + piece_blocks(form.nbytes)) * form.names]
            lease = room.take(form.size_of(blocks))
            if lease is None:
                return False
        views = _views(self._memory, blocks) if lease is None else [lease.memory]
        piece = _Piece(arrival.placed, form.size_of(blocks), blocks, lease)
        while room.untold:
            send_frame(sock, Frame(FrameKind.METADATA, metadata=room.untold.pop(0)))
        arrival.pieces.append(piece)
        arrival.placed += piece.length
        spans = [span_of(view) for view in views]
        place = Frame(FrameKind.PLACE, arrival.tag, piece.offset, piece.length, kind_of(views[0]), spans)
        send_frame(sock, place)
        return True

    def _note(self, sock: socket.socket, notice: Notice, room: _RegisteredRoom) -> None:
        """Take note of bytes that have been written."""
        self._due -= 1
        arrival = self._arrivals.get(notice.tag)
        start, end = notice.offset, notice.offset + notice.length
        pieces = arrival.pieces if arrival is not None else []
        piece = next((p for p in pieces if p.offset <= start and end <= p.offset + p.length), None)
        if arrival is None or piece is None or piece.landed + notice.length > piece.length:
            raise TransferError(f"bytes {start} to {end} of message {notice.tag} have no place")
        piece.landed += notice.length
        if piece.landed < piece.length:
            return
        if piece.lease is not None:
            self._memory.scatter(piece.blocks, piece.lease.memory)
            room.give_back(piece.lease)
        arrival.pieces.remove(piece)
        arrival.landed += piece.length
        if arrival.landed == arrival.size:
            del self._arrivals[arrival.tag]
            self._complete(arrival.receive)
            send_frame(sock, Frame(FrameKind.LANDED, arrival.tag))


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A message that was announced."""

    message: OutgoingMessage
    size: int
    placed: int = 0
    written: int = 0
    landed: bool = False
    """Whether decode has said that all of it has landed."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of a part of a message, and how many of its bytes have been started."""

    outgoing: _Outgoing
    frame: Frame
    started: int = 0


@dataclass(slots=True, eq=False)
class _Write:
    outgoing: _Outgoing
    notice: Notice
    handle: int
    lease: _Lease | None


class NixlSendingLink(TcpSendingLink):
    """Prefill's end: announces messages, and writes them where decode says."""

    _bell: _Bell | None = None

    def __init__(
        self,
        memory: PageMemory,
        room: StagingRoom[memoryview],
        stream: Stream,
        on_lost: Callable[[], None],
        on_crash: Callable[[], None],
        agents: AgentFactory,
    ) -> None:
        self._agents = agents
        self._whole = memory.whole()
        self._announced: dict[int, _Outgoing] = {}
        self._places: deque[_Place] = deque()
        self._writes: list[_Write] = []
        super().__init__(memory, room, stream, on_lost, on_crash)

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        done = super().send(tag, blocks)
        self._ring()
        return done

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def _wake(self) -> None:
        super()._wake()
        self._ring()

    def _watch(self, sock: socket.socket) -> None:
        """Leave the socket to the link's thread, which reads it."""

    def _run(self, stream: Stream) -> None:
        sock = stream.sock
        with contextlib.ExitStack() as fence:  # left from its end to its start
            self._bell = fence.enter_context(contextlib.closing(_Bell()))
            agent = self._agents.make()
            room = _RegisteredRoom(self._room, agent, self._bell.ring)
            fence.callback(room.close)
            fence.callback(agent.close)
            if self._whole is not None:
                agent.register(self._whole)
            while self._announce(sock):
                self._begin(agent, room)
                busy = self._check(sock, agent, room)
                if self._bell.heard(sock, wait=not self._writes):
                    self._hear(sock, agent)
                elif self._writes and not busy:
                    time.sleep(_LOOK_S)

    def _announce(self, sock: socket.socket) -> bool:
        """Announce messages that wait. False: the link was closed."""
        while len(self._announced) < _WINDOW:
            try:
                message = self._queue.get_nowait()
            except queue.Empty:
                return True
            if message is None:
                return False
            if message.tag in self._announced:
                raise TransferError(f"message {message.tag} is on its way already")
            size = self._memory.form_of(message.blocks).size_of(message.blocks)
            self._announced[message.tag] = _Outgoing(message, size)
            send_frame(sock, Frame(FrameKind.ANNOUNCE, message.tag, length=size))
        return True

    def _hear(self, sock: socket.socket, agent: NixlAgent) -> None:
        allowed = (FrameKind.METADATA, FrameKind.PLACE, FrameKind.LANDED, FrameKind.REFUSED)
        frame = read_frame(sock, allowed)
        if frame.kind == FrameKind.METADATA:
            agent.meet(frame.metadata)
            return
        outgoing = self._announced.get(frame.tag)
        if outgoing is None:
            raise TransferError(f"the peer speaks of message {frame.tag}, which is not on its way")
        if frame.kind == FrameKind.PLACE:
            self._take_place(outgoing, frame)
            return
        outgoing.landed = frame.kind == FrameKind.LANDED
        if outgoing.placed != (outgoing.size if outgoing.landed else 0):
            raise TransferError(f"the peer says {frame.kind.name} of message {frame.tag} in its middle")
        self._end_if_over(outgoing)

    def _end_if_over(self, outgoing: _Outgoing) -> None:
        """End a send that decode has refused, or of which both NIXL and decode have said that it is over: the
        notification reaches decode before this end hears that it was sent."""
        if outgoing.written == (outgoing.size if outgoing.landed else 0):
            del self._announced[outgoing.message.tag]
            self._post(settle, outgoing.message.done, None)

    def _take_place(self, outgoing: _Outgoing, frame: Frame) -> None:
        """Check a place that the peer has said: the next whole blocks of its message, and as many bytes."""
        sound = (
            frame.offset == outgoing.placed
            and 0 < frame.length <= outgoing.size - outgoing.placed
            and frame.length % self._memory.form_of(outgoing.message.blocks).nbytes == 0
            and sum(span.nbytes for span in frame.spans) == frame.length
            and all(span.nbytes for span in frame.spans)
        )
        if not sound:
            raise TransferError(f"the peer's place for message {frame.tag} does not fit it")
        outgoing.placed += frame.length
        self._places.append(_Place(outgoing, frame))

    def _begin(self, agent: NixlAgent, room: _RegisteredRoom) -> None:
        """Start writes, in the order of their places."""
        while self._places and len(self._writes) < _MAX_WRITES:
            if not self._begin_write(self._places[0], agent, room):
                return
            if self._places[0].started == self._places[0].frame.length:
                self._places.popleft()

    def _begin_write(self, place: _Place, agent: NixlAgent, room: _RegisteredRoom) -> bool:
        """Write all that has a place, or the next piece of it by way of staging memory. False: there is no
        room."""
        frame, message, lease = place.frame, place.outgoing.message, None
        form = self._memory.form_of(message.blocks)
        first, end = (at // form.nbytes for at in (frame.offset + place.started, frame.offset + frame.length))
        blocks = message.blocks[first * form.names : end * form.names]
        if self._whole is None:
            blocks = blocks[: piece_blocks(form.nbytes) * form.names]
            lease = room.take(form.size_of(blocks))
            if lease is None:
                return False
            room.untold.clear()
            self._memory.gather(blocks, lease.memory)
        views = _views(self._memory, blocks) if lease is None else [lease.memory]
        notice = Notice(frame.tag, frame.offset + place.started, form.size_of(blocks))
        ours, theirs = paired(
            [span_of(view) for view in views], cut(frame.spans, place.started, notice.length)
        )
        handle = agent.write((kind_of(views[0]), ours), (frame.memory, theirs), notice.packed())
        self._writes.append(_Write(place.outgoing, notice, handle, lease))
        place.started += notice.length
        return True

    def _check(self, sock: socket.socket, agent: NixlAgent, room: _RegisteredRoom) -> bool:
        """Look which writes are over. True: there was one."""
        running = [write for write in self._writes if not agent.over(write.handle)]
        ended = [write for write in self._writes if write not in running]
        self._writes = running
        for write in ended:
            if write.lease is not None:
                room.give_back(write.lease)
            write.outgoing.written += write.notice.length
            send_frame(sock, Frame(FrameKind.WRITTEN, write.notice.tag))
            if write.outgoing.landed:
                self._end_if_over(write.outgoing)
        return bool(ended)


def _end_writing(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has gone already
        sock.shutdown(socket.SHUT_WR)


def _nothing() -> None:
    """Do nothing: the loss was told already."""


class NixlConnector:
    """``Connector`` over NIXL. Not encrypted: keep it on a network of your own."""

    name = "nixl"
    drained_is_proof = True
    """True because a send is over only when decode has said that all of it has landed."""

    def __init__(
        self,
        staging: Staging,
        on_crash: Callable[[], None],
        options: Mapping[str, str] | None = None,
        device: int | None = None,
    ) -> None:
        """``on_crash`` ends the worker: an unexpected error on a thread leaves pages pinned for ever.
        ``options``: options of UCX, without their prefix ``UCX_``. ``device``: the CUDA device of the pool.
        Raises ImportError without NIXL, TransferError where UCX does not start."""
        self._agents = AgentFactory(options or {}, device)
        self._agents.make().close()  # loads its plugins, and shows what is missing, before the first link
        self._staging = staging
        self._on_crash = on_crash
        self._expected: dict[bytes, NixlReceivingLink] = {}
        self._listener = DataListener(_MAGIC, self._expected, self._admitted)

    @property
    def missing_for_rdma(self) -> str:
        """What is missing: a device, as NIXL's own UCX has verbs."""
        return "" if rdma_ports() else "this host shows no RDMA device"

    async def listen(self, host: str, port: int) -> str:
        return self._listener.open(host, port)

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        def forget() -> None:
            self._expected.pop(token, None)

        room = self._staging.receiving
        link = NixlReceivingLink(memory, room, on_lost, self._on_crash, forget, self._agents)
        self._expected[token] = link
        return link

    def _admitted(self, token: bytes, stream: Stream) -> None:
        stream.sock.setblocking(True)
        self._expected.pop(token).attach(stream)

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        stream = await dial(address, _MAGIC, token)
        stream.sock.setblocking(True)
        room = self._staging.sending
        return NixlSendingLink(memory, room, stream, on_lost, self._on_crash, self._agents)

    async def close(self) -> None:
        await self._listener.close()


def nixl(settings: ConnectorSettings) -> NixlConnector:
    """Make the connector. Raises ImportError without NIXL, ConnectorMissingError where its UCX does not
    start."""
    try:
        options = interface_options(settings.host)
        return NixlConnector(settings.staging, settings.on_crash, options, settings.device)
    except TransferError as error:
        raise ConnectorMissingError(f"NIXL does not start: {error}") from error
