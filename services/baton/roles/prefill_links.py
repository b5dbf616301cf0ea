"""Prefill's links to decode workers: one to each decode process, made before the first request needs it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import TypeAlias
from weakref import WeakSet

import grpc

from baton.greeting.proofs import Caller, NoChallengeError
from baton.handoff import wire
from baton.handoff.messages import LinkId
from baton.handoff.wiring import Wiring
from baton.net.channels import STREAM_OPTIONS
from baton.net.heartbeat import TEMPO, Pulse, Tempo
from baton.net.message_parts import LINK, in_parts
from baton.roles.prefill_peers import MAX_PAUSE_S, MAX_PEERS, Backoff, KnownPeers, Peer
from baton.telemetry.handoff import BusyTime, Pair
from baton.telemetry.supervision import Supervision
from baton.transport.base import TransferError
from baton.transport.ranks.endpoint import DataLink
from baton.v1 import handoff_pb2 as pb

log = logging.getLogger(__name__)

OPEN_S = 5.0
DIALS_AT_ONCE = 16
"""Most dials in the background at once. A request's own dial waits for none of them."""


class LinkRefusedError(Exception):
    """Decode refuses a link; the message is its reason. The same configuration is refused again."""

    def __init__(self, reason: str, field: str = "") -> None:
        """``field``: the field in which the two processes differ, so that they can never be linked; empty if
        decode names none."""
        super().__init__(reason)
        self.field = field


class UnreachableError(Exception):
    """No process answers a dial. The text is the error that was met."""


_UNREACHABLE = (OSError, TransferError, TimeoutError, grpc.aio.AioRpcError)


LinkStream: TypeAlias = "grpc.aio.StreamStreamCall[bytes, pb.DecodeMessage]"

LateMessage = Callable[[], pb.PrefillMessage | None]
"""A function that makes a message when its turn on the stream comes, or returns None if it is no longer
wanted. Long messages are made this way: a queue of them would hold each prompt once more."""


class DecodePeer:
    """One decode process: the control stream, the data connection and the link's name.

    The fields that decode's answer settles (``block_size``, ``verify``, ``pair``, ``busy``) are set once
    ``open`` has returned, and so is ``living``. ``on_message`` gets every message after the greeting;
    ``on_lost`` is called once, when either connection has ended and the data connection is closed, so that no
    send can read a page any more.
    """

    def __init__(
        self,
        address: str,
        wiring: Wiring,
        on_message: Callable[[LinkId, pb.DecodeMessage], None],
        on_lost: Callable[[DecodePeer], None],
        tempo: Tempo = TEMPO,
        calls: WeakSet[LinkStream] | None = None,
    ) -> None:
        """``calls``: the set that notes the call, for as long as anything holds it."""
        self.address = address
        self.link: LinkId | None = None
        self.data: DataLink | None = None
        self.block_size: int
        self.verify: bool
        self.pair: Pair
        self.busy: BusyTime
        self.living: asyncio.Task[None]
        """The task that ends with the link. Raises if the data connection, and so its sends, could not be
        ended."""
        self._wiring = wiring
        self.pulse = Pulse(tempo)
        self.ended = asyncio.Event()
        """An event that is set when ``on_lost`` has been called."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._calls = WeakSet[LinkStream]() if calls is None else calls
        self._outbound: asyncio.Queue[pb.PrefillMessage | LateMessage | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self, greeting: pb.LinkOpen) -> LinkId:
        """Dial and greet. Raises LinkRefusedError, or UnreachableError if there is no answer in OPEN_S."""
        try:
            return await self._dial(greeting)
        except LinkRefusedError as error:
            failed: Exception = LinkRefusedError(str(error), error.field)
        except _UNREACHABLE as error:
            failed = UnreachableError(repr(error))
        # A new error, without the frames of the one that was met: they hold the call, and as long as anything
        # holds the call, gRPC keeps its connection, or makes it anew.
        try:
            raise failed
        finally:
            del failed

    async def _dial(self, greeting: pb.LinkOpen) -> LinkId:
        """Raises LinkRefusedError, or one of _UNREACHABLE."""
        channel = self._wiring.dialer.channel(self.address, STREAM_OPTIONS)
        link_up = channel.stream_stream(LINK, None, pb.DecodeMessage.FromString)
        stream: LinkStream = link_up(self._outgoing())
        self._calls.add(stream)
        try:
            async with asyncio.timeout(OPEN_S):
                await self._greet(stream, greeting.prefill_incarnation)
                self.send(pb.PrefillMessage(open=greeting))
                accept = _accepted(await stream.read())
                self.data = await self._connect(accept)
                if self._closing:
                    raise TransferError("the data connection ended as soon as it was made")
        except BaseException:
            self._outbound.put_nowait(None)
            if self.data is not None:
                await self.data.close()
            await _hang_up(stream, channel)
            raise
        link = LinkId(greeting.prefill_incarnation, accept.decode_incarnation, accept.epoch)
        self.link = link
        self._reading = asyncio.create_task(self._read(stream, link), name=f"read {self.address}")
        living = self._live(stream, channel, self._reading)
        self.living = asyncio.create_task(living, name=f"link {self.address}")
        return link

    async def _greet(self, stream: LinkStream, incarnation: str) -> None:
        """Authenticate both sides. Raises GreetingError, and what reading raises."""
        caller = Caller(self._wiring.keys, "prefill", incarnation)
        self.send(pb.PrefillMessage(greeting=caller.greeting))
        answer = await stream.read()
        if not isinstance(answer, pb.DecodeMessage) or not answer.HasField("challenge"):
            raise NoChallengeError
        self.send(pb.PrefillMessage(proof=caller.prove(answer.challenge)))

    async def _connect(self, accept: pb.LinkAccept) -> DataLink:
        """Take decode's terms and make the data connection, or one for each pair of ranks. Raises
        LinkRefusedError if the terms are malformed, and what connecting raises."""
        ends = self._wiring.ends
        if accept.connector not in ends.connectors:
            raise LinkRefusedError(f"decode chose a connector not offered: {accept.connector!r}")
        self.block_size, self.verify = accept.block_size, accept.verify
        self.pair = Pair(self.address, accept.connector)
        self.busy = BusyTime(partial(self._wiring.metrics.sending, self.pair))
        channels = wire.channels_of(accept, self._wiring.whole)
        try:
            return await ends.connect(accept.connector, accept.block_size, channels, self.close)
        except ValueError as error:
            raise LinkRefusedError(f"decode chose wire blocks that cannot be: {error}") from error

    @property
    def connector(self) -> str:
        """The name of the connector that carries the blocks."""
        return self.pair.connector

    @property
    def closing(self) -> bool:
        """Whether the link is ending, so that nothing may be begun on it."""
        return self._closing

    def send(self, message: pb.PrefillMessage | LateMessage) -> None:
        self._outbound.put_nowait(message)

    def close(self) -> None:
        """End the link; ``on_lost`` follows, once, however often ``close`` is called."""
        self._closing = True
        if self._reading is not None:
            self._reading.cancel()

    async def _outgoing(self) -> AsyncIterator[bytes]:
        while (message := await self._outbound.get()) is not None:
            made = message() if callable(message) else message
            if made is not None:
                for part in in_parts(made):
                    yield part

    async def _read(self, stream: LinkStream, link: LinkId) -> None:
        while isinstance(message := await stream.read(), pb.DecodeMessage):
            self.pulse.heard()
            self._on_message(link, message)

    async def _live(self, stream: LinkStream, channel: grpc.aio.Channel, reading: asyncio.Task[None]) -> None:
        """Wait for the end of the reading task, and end the rest of the link. The reading task itself cannot:
        it may be cancelled at any moment, even before it has begun."""
        (ended,), _ = await asyncio.wait((reading,))
        # The task's exception holds the frame that holds this object and the call: as long as they hold each
        # other, gRPC keeps the connection, and the decode worker its end of it.
        self._reading = None
        error = None if ended.cancelled() else ended.exception()
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else repr(error)
        log.info("the link to decode at %s has ended%s", self.address, f": {reason}" if error else "")
        self._closing = True
        self._outbound.put_nowait(None)
        if self.data is not None:
            await self.data.close()
        self._on_lost(self)
        self.ended.set()
        await _hang_up(stream, channel)


def _accepted(answer: object) -> pb.LinkAccept:
    """Return decode's terms. Raises LinkRefusedError, and TransferError for any other answer."""
    if not isinstance(answer, pb.DecodeMessage):
        raise TransferError("decode ended the stream without an answer")
    if answer.HasField("refuse"):
        # A process that has been started again is another, and nothing is known of that.
        lasting = answer.refuse.field if answer.refuse.field != "decode_incarnation" else ""
        raise LinkRefusedError(answer.refuse.reason, lasting)
    if not answer.HasField("accept"):
        raise TransferError("decode answered neither accept nor refuse")
    return answer.accept


async def _hang_up(stream: LinkStream, channel: grpc.aio.Channel) -> None:
    """End a call, and then its channel: a channel that is closed while its call lasts keeps the connection,
    and decode its end of it."""
    stream.cancel()
    await channel.close(None)


class DecodeLinks:
    """The links to decode processes, at most one to each.

    Links to known peers are made in the background and made again when they are lost. A link to any other
    peer is made when a request asks for it, and closed when no handoff is open on it.

    ``dial`` opens a connection and calls its second argument when the connection is lost; ``opened`` and
    ``lost`` are called for every link; ``busy`` says whether a handoff is open on a link; ``tasks``
    supervises the tasks that keep the links.
    """

    def __init__(
        self,
        dial: Callable[[Peer, Callable[[DecodePeer], None]], Awaitable[DecodePeer]],
        opened: Callable[[DecodePeer], None],
        lost: Callable[[LinkId], None],
        busy: Callable[[LinkId], bool],
        tasks: Supervision | None = None,
    ) -> None:
        self._dial = dial
        self._supervision = tasks or Supervision()
        self._opened = opened
        self._lost = lost
        self._busy = busy
        self._known = KnownPeers()
        self.calls: WeakSet[LinkStream] = WeakSet()
        """The control calls that exist, even if they have ended: gRPC keeps a connection for each."""
        self._open: dict[str, DecodePeer] = {}
        self._dials: dict[str, asyncio.Task[DecodePeer]] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._refused: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """The reasons and fields of refusals, by incarnation: only another process gives another answer."""
        self._waiting: Counter[str] = Counter()
        """Requests that wait for a link, by incarnation."""
        self._slots = asyncio.Semaphore(DIALS_AT_ONCE)

    def at(self, link: LinkId) -> DecodePeer | None:
        """Return the connection of a link, if the link is still open."""
        connection = self._open.get(link.decode)
        return connection if connection is not None and connection.link == link else None

    async def to(self, peer: Peer) -> LinkId:
        """Return the link to a decode process; if there is none, make it, with one dial for all callers.

        Raises LinkRefusedError or UnreachableError. The link is not closed before the caller awaits again.
        """
        self._waiting[peer.incarnation] += 1
        try:
            connection = await self._connection(peer)
        finally:
            self._waiting[peer.incarnation] -= 1
            if not self._waiting[peer.incarnation]:
                del self._waiting[peer.incarnation]
        assert connection.link is not None
        return connection.link

    @property
    def open_links(self) -> int:
        return len(self._open)

    @property
    def control_channels(self) -> int:
        """The number of connections of control calls: those of links, of dials, and any that is left over."""
        return len(self.calls)

    def __bool__(self) -> bool:
        """Return whether there is a link, or is about to be one."""
        return bool(self._open or self._dials or self._keepers)

    async def close(self) -> None:
        """End every link. The next one is made when a router names peers again, or a request needs one."""
        tasks = [*self._keepers.values(), *self._dials.values()]
        self._known.clear()
        self._keepers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connections = list(self._open.values())
        for connection in connections:
            connection.close()
        if connections:  # wait, not gather: a caller that is cancelled must not cancel the ends of the links
            await asyncio.wait([connection.living for connection in connections])

    # --- known peers

    def know(self, router_id: str, peers: Iterable[Peer]) -> None:
        """Take a router's list of all decode workers that it hands requests to."""
        self._known.tell(router_id, peers)
        self._follow()

    def forget(self, router_id: str) -> None:
        """Forget a router that is gone, with the peers that only it named."""
        self._known.forget(router_id)
        self._follow()

    def _follow(self) -> None:
        known = self._known.by_incarnation()
        for incarnation in self._keepers.keys() - known.keys():
            self._keepers.pop(incarnation).cancel()
        for incarnation in known.keys() - self._keepers.keys():
            peer = known[incarnation]
            keep = partial(self._keep, peer)
            self._keepers[incarnation] = self._supervision.start("link", keep, of=peer.address)

    async def _keep(self, peer: Peer) -> None:
        """Keep a link to a known peer until it refuses. Cancelled when the peer is no longer known."""
        backoff, level = Backoff(), logging.INFO
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with self._slots:
                    connection = await self._connection(peer)
            except LinkRefusedError:
                return
            except UnreachableError as error:
                log.log(level, "no link to decode at %s: %s", peer.address, error)
                level = logging.DEBUG  # until a link is made
            else:
                since, level = clock(), logging.INFO
                await connection.ended.wait()
                if clock() - since >= MAX_PAUSE_S:
                    backoff.reset()
            await asyncio.sleep(backoff.pause())

    # --- dialling

    async def _connection(self, peer: Peer) -> DecodePeer:
        while (connection := self._open.get(peer.incarnation)) is not None:
            if not connection.closing:
                return connection
            await connection.ended.wait()
        refusal = self._refused.get(peer.incarnation)
        if refusal is not None:
            raise LinkRefusedError(*refusal)
        dial = self._dials.get(peer.incarnation)
        if dial is None:
            dial = asyncio.create_task(self._connect(peer), name=f"dial {peer.address}")
            self._dials[peer.incarnation] = dial
            dial.add_done_callback(lambda done: self._dialled(peer, done))
        return await asyncio.shield(dial)

    async def _connect(self, peer: Peer) -> DecodePeer:
        try:
            connection = await self._dial(peer, self._on_lost)
        except LinkRefusedError as error:
            log.warning("decode at %s refused the link: %s", peer.address, error)
            self._refused[peer.incarnation] = str(error), error.field
            if len(self._refused) > MAX_PEERS:
                self._refused.popitem(last=False)
            raise
        assert connection.link is not None
        self._open[peer.incarnation] = connection
        self._opened(connection)
        epoch = connection.link.epoch
        log.info("linked to decode at %s, epoch %d, connector %s", peer.address, epoch, connection.connector)
        return connection

    def _dialled(self, peer: Peer, dial: asyncio.Task[DecodePeer]) -> None:
        del self._dials[peer.incarnation]
        if not dial.cancelled():
            dial.exception()  # marked as retrieved: waiting callers get it, and without any it is no news

    def _on_lost(self, connection: DecodePeer) -> None:
        link = connection.link
        if link is not None and self.at(link) is connection:
            del self._open[link.decode]
            self._lost(link)

    # --- time

    def tick(self, elapsed: float) -> None:
        """Advance the timers by ``elapsed`` seconds: send heartbeats, close silent and unused links."""
        for incarnation, connection in list(self._open.items()):
            link = connection.link
            assert link is not None
            if connection.pulse.tick(elapsed):
                connection.send(pb.PrefillMessage(heartbeat=pb.Heartbeat()))
            if connection.pulse.lost(partial(self._busy, link)):
                log.warning("decode at %s is silent: the link is closed", connection.address)
                connection.close()
            elif self._unused(incarnation, link):
                connection.close()

    def _unused(self, incarnation: str, link: LinkId) -> bool:
        wanted = incarnation in self._known or self._waiting[incarnation] > 0
        return not wanted and not self._busy(link)
