"""The worker's side of a rank in another process: it sends orders there and reads their results.

**A receive is posted where the rank is.** Until the rank confirms it, decode must not tell prefill of it: see
``DataLink.in_place``. A transfer that the rank reports over, the rank's connector has reported over: the
proof is the connector's own.

**A dead rank** closes its socket. Its memory went with it, so that its transfers are over, failed, and its
links are lost and closed. A rank that does not answer proves nothing: none of its transfers is over, and a
``close`` does not return.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from baton.net.certificates import TlsFiles
from baton.transport.base import BlockForm, GroupPart, TransferError
from baton.transport.block_names import group_of
from baton.transport.kv_types import arriving_bytes
from baton.transport.ranks import frames
from baton.transport.ranks.endpoint import ChannelShape, DataLink

log = logging.getLogger(__name__)

T = TypeVar("T")

_GONE = "the rank's process has ended"
_CLOSE_S = 1.0


class EndpointMissingError(Exception):
    """A rank that cannot take part in handoffs; the message says why."""


class RemoteEndpoint:
    """``RankEndpoint`` whose pool and connectors are in another process. Made by ``meet``."""

    def __init__(
        self, hello: frames.Hello, writer: asyncio.StreamWriter, on_crash: Callable[[], None]
    ) -> None:
        self.share = frames.shard_of_parts(hello.parts)
        self.connectors = hello.connectors
        self.drained_is_proof = hello.drained_is_proof
        self._forms = hello.forms
        self._writer = writer
        self._on_crash = on_crash
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._questions: dict[int, asyncio.Future[frames.Said]] = {}
        self._last_call = 0
        self._last_link = 0
        self._links: dict[int, Callable[[], None]] = {}
        """The function to call when a link is lost, by link."""
        self._not_in_place: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._ended = asyncio.Event()
        self._said_all = False

    @classmethod
    async def meet(
        cls,
        sock: socket.socket,
        *,
        connector: str,
        host: str,
        on_crash: Callable[[], None],
        tls: TlsFiles | None = None,
        require_rdma: bool = False,
    ) -> RemoteEndpoint:
        """Begin with a rank at the other end of ``sock``, whose worker's end nothing else may hold.
        ``connector``, ``host``, ``tls`` and ``require_rdma`` as ``registry.available`` takes them.
        ``on_crash`` is called if the rank breaks the protocol.

        Raises EndpointMissingError, and what ``frames.said`` raises.
        """
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        wire_tls = None if tls is None else frames.WireTls.of(tls)
        writer.write(frames.encoded(frames.Begin(connector, host, wire_tls, require_rdma)))
        hearing = frames.said(reader)
        hello = await anext(hearing, None)
        if not isinstance(hello, frames.Hello):
            writer.close()
            raise EndpointMissingError(hello.reason if isinstance(hello, frames.Unable) else _GONE)
        rank = cls(hello, writer, on_crash)
        rank._reading = asyncio.create_task(rank._read(reader), name="rank's words")
        rank._reading.add_done_callback(rank._read_all)
        return rank

    async def listen(self, host: str, port: int) -> Mapping[str, str]:
        try:
            said = await self.ask(lambda call: frames.Listen(call, host, port))
        except TransferError as error:
            raise OSError(str(error)) from error
        assert isinstance(said, frames.Listening)
        return said.addresses

    def expect(
        self, connector: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        link = self._link(cut, on_lost)
        wire = frames.WireShape.of(cut)
        expected = self.call(lambda call: frames.ExpectFrame(call, link.number, connector, token, wire))
        expected.add_done_callback(partial(self._expected, link))
        link.asked()
        return link

    def _expected(self, link: RemoteLink, expected: asyncio.Future[None]) -> None:
        if expected.exception() is not None:
            self._lose(link.number)

    async def connect(
        self, connector: str, address: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        link = self._link(cut, on_lost)
        wire = frames.WireShape.of(cut)
        try:
            await self.call(
                lambda call: frames.ConnectFrame(call, link.number, connector, address, token, wire)
            )
        except BaseException:
            link.start_closing()  # the rank may have made it all the same
            raise
        return link

    def _link(self, cut: ChannelShape, on_lost: Callable[[], None]) -> RemoteLink:
        if not cut.share.within(self.share):
            raise ValueError(f"{cut.share}: of {self.share} are allowed, which this rank holds")
        self._last_link += 1
        self._links[self._last_link] = on_lost
        return RemoteLink(self, self._last_link, self._block_forms(cut))

    def _block_forms(self, cut: ChannelShape) -> tuple[BlockForm, ...]:
        def nbytes(form: frames.CellForm, part: GroupPart) -> int:
            numbers = part.size * form.numbers
            if form.is_state:
                return numbers * form.element_bytes
            size = arriving_bytes(cut.arrives_as, form.element_bytes)
            return numbers * cut.block_size * size + part.size * form.scale_bytes

        return tuple(
            BlockForm(form.tables, nbytes(form, part))
            for form, part in zip(self._forms, cut.share.groups, strict=True)
        )

    async def close(self) -> None:
        """Have the rank close all its links and connectors, and its socket. A rank that does not, within a
        second, is left to the owner of its process."""
        with contextlib.suppress(OSError, TimeoutError):
            self._said_all = True
            self._writer.write_eof()
            async with asyncio.timeout(_CLOSE_S):
                await self._ended.wait()
        if self._reading is not None:
            self._reading.cancel()
        self._writer.close()

    @property
    def gone(self) -> bool:
        """Whether the rank's process has ended, or at least its links: none of their bytes moves."""
        return self._ended.is_set()

    # --- orders

    def order(self, order: frames.Order) -> None:
        # A rank that was told to close everything needs no further orders.
        if not self._said_all and not self._writer.is_closing():
            self._writer.write(frames.encoded(order))

    def call(self, order: Callable[[int], frames.Order]) -> asyncio.Future[None]:
        """Give an order, made with the call number it gets. Done when the rank says so; TransferError if the
        order failed, or if the rank is gone."""
        return self._give(self._calls, order)

    def ask(self, order: Callable[[int], frames.Order]) -> asyncio.Future[frames.Said]:
        """Give an order as ``call`` does; the result is the rank's answer."""
        return self._give(self._questions, order)

    def _give(
        self, calls: dict[int, asyncio.Future[T]], order: Callable[[int], frames.Order]
    ) -> asyncio.Future[T]:
        self._last_call += 1
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self.gone:
            answer.set_exception(TransferError(_GONE))
        else:
            calls[self._last_call] = answer
            self.order(order(self._last_call))
        return answer

    def in_place(self) -> asyncio.Future[None] | None:
        """Return a future that is done when the last call so far has taken effect at the rank, for calls that
        are answered with ``InPlace``. None: the rank is gone."""
        if self.gone:
            return None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._not_in_place.append((self._last_call, done))
        return done

    def forget(self, link: int) -> None:
        """Forget a closed link: nothing more is to be heard of it."""
        self._links.pop(link, None)

    # --- frames of the rank

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read the rank's frames. Raises the errors of a rank that lives and breaks the protocol: these prove
        nothing."""
        try:
            async for said in frames.said(reader):
                self._hear(said)
        except OSError as error:
            log.info("the connection to a rank has ended: %s", error)
        self._end()

    def _read_all(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and reading.exception() is not None:
            log.critical("a rank cannot be understood", exc_info=reading.exception())
            self._on_crash()

    def _hear(self, said: frames.Said) -> None:
        match said:
            case frames.Lost(link=link):
                self._lose(link)
            case frames.InPlace(call=call):
                while self._not_in_place and self._not_in_place[0][0] <= call:
                    _settle(self._not_in_place.popleft()[1], None)
            case frames.Done(call=call):
                _settle(self._calls.pop(call), None)
            case frames.Listening(call=call) | frames.Checked(call=call):
                _settle(self._questions.pop(call), said)
            case frames.FailedFrame(call=call, reason=reason):
                if call in self._calls:
                    _fail(self._calls.pop(call), reason)
                else:
                    _fail(self._questions.pop(call), reason)
            case _:
                raise frames.FrameError(f"not to be said now: {said}")

    def _end(self) -> None:
        """End all transfers and links: the rank's socket is closed."""
        self._ended.set()
        self._writer.close()
        while self._not_in_place:
            _settle(self._not_in_place.popleft()[1], None)
        while self._calls:
            _fail(self._calls.popitem()[1], _GONE)
        while self._questions:
            _fail(self._questions.popitem()[1], _GONE)
        for link in list(self._links):
            self._lose(link)

    def _lose(self, link: int) -> None:
        on_lost = self._links.pop(link, None)
        if on_lost is not None:
            on_lost()


def _settle(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[T], reason: str) -> None:
    if not answer.done():
        answer.set_exception(TransferError(reason))


class RemoteLink:
    """``DataLink`` of a remote rank."""

    def __init__(self, rank: RemoteEndpoint, number: int, forms: Sequence[BlockForm]) -> None:
        """``forms``: of each group's blocks."""
        self.number = number
        self._forms = forms
        self._rank = rank
        self._in_place: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] | None = None

    def size_of(self, blocks: Sequence[int]) -> int:
        return self._forms[group_of(blocks[0])].size_of(blocks)

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        receive = self._rank.call(lambda call: frames.PostReceiveFrame(call, self.number, tag, tuple(blocks)))
        self.asked()
        return receive

    def cancel_receive(self, tag: int) -> bool:
        """Return False always: only the rank knows whether the receive was withdrawn, and the end of the
        receive tells."""
        self._rank.order(frames.CancelReceiveFrame(self.number, tag))
        return False

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        return self._rank.call(lambda call: frames.SendFrame(call, self.number, tag, tuple(blocks)))

    async def checksum(self, blocks: Sequence[int]) -> int:
        said = await self._rank.ask(lambda call: frames.Checksum(call, self.number, tuple(blocks)))
        assert isinstance(said, frames.Checked)
        return said.crc

    def asked(self) -> None:
        """Remember the last call so far, which is answered with ``InPlace``."""
        self._in_place = self._rank.in_place()

    def in_place(self) -> Awaitable[None] | None:
        return None if self._in_place is None or self._in_place.done() else self._in_place

    def start_closing(self) -> asyncio.Future[None]:
        if self._closing is None:
            self._rank.forget(self.number)
            self._closing = self._rank.call(lambda call: frames.Close(call, self.number))
            self._closing.add_done_callback(asyncio.Future.exception)  # retrieved even if not awaited
        return self._closing

    async def close(self) -> None:
        try:
            await asyncio.shield(self.start_closing())
        except TransferError:
            if not self._rank.gone:
                raise
