"""Prefill's links to decode workers: dialled when first needed, one per decode process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from baton.connector.liveness import Pulse
from baton.connector.messages import LinkId
from baton.connector.transport import Link, PageMemory, TransferError
from baton.connector.wiring import Wiring
from baton.telemetry.handoff import BusyTime, Pair
from baton.v1 import handoff_pb2 as pb
from baton.v1 import handoff_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

OPEN_S = 5.0
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


class LinkRefusedError(Exception):
    """Decode will not link, and says why. Asking again with the same configuration is of no use."""


class DecodePeer:
    """One decode process: the control stream, the data connection and the link's name.

    What decode's answer settles (``memory``, ``block_size``, ``verify``, ``pair``, ``busy``) is there once
    ``open`` has returned.
    ``on_message`` gets every message after the greeting; ``on_lost`` is called once, when either connection
    has ended and the data connection is closed, so that no send can read a page any more.
    """

    def __init__(
        self,
        address: str,
        wiring: Wiring,
        on_message: Callable[[LinkId, pb.DecodeMessage], None],
        on_lost: Callable[[DecodePeer], None],
    ) -> None:
        self.address = address
        self.link: LinkId | None = None
        self.data: Link | None = None
        self.memory: PageMemory
        self.block_size: int
        self.verify: bool
        self.pair: Pair
        self.busy: BusyTime
        self.pulse = Pulse()
        self._wiring = wiring
        self._on_message = on_message
        self._on_lost = on_lost
        self._outbound: asyncio.Queue[pb.PrefillMessage | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def open(self, greeting: pb.LinkOpen) -> LinkId:
        """Dial and greet. Raises LinkRefusedError, or OSError, TransferError or grpc.aio.AioRpcError when
        there is nobody or no answer within OPEN_S."""
        channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout(OPEN_S):
                stream = pb_grpc.HandoffStub(channel).Link(self._outgoing())
                self.send(pb.PrefillMessage(open=greeting))
                answer = await stream.read()
                if not isinstance(answer, pb.DecodeMessage):
                    raise TransferError("decode ended the stream without an answer")
                if answer.HasField("refuse"):
                    raise LinkRefusedError(answer.refuse.reason)
                if not answer.HasField("accept"):
                    raise TransferError("decode answered neither accept nor refuse")
                accept = answer.accept
                self.data = await self._connect(accept)
        except BaseException:
            self._outbound.put_nowait(None)
            if self.data is not None:
                await self.data.close()
            await channel.close(None)
            raise
        link = LinkId(greeting.prefill_incarnation, accept.decode_incarnation, accept.epoch)
        self.link = link
        self._task = asyncio.create_task(self._read(channel, stream, link), name=f"link {self.address}")
        return link

    async def _connect(self, accept: pb.LinkAccept) -> Link:
        """Take decode's terms and make the data connection."""
        connector = self._wiring.connectors.get(accept.connector)
        if connector is None:
            raise LinkRefusedError(f"decode chose a connector not offered: {accept.connector!r}")
        try:
            self.memory = self._wiring.memory.part(accept.block_size)
        except ValueError as error:
            raise LinkRefusedError(f"decode chose wire blocks that cannot be: {error}") from error
        self.block_size, self.verify = accept.block_size, accept.verify
        self.pair = Pair(self.address, accept.connector)
        self.busy = BusyTime(partial(self._wiring.metrics.sending, self.pair))
        return await connector.connect(accept.data_address, accept.data_token, self.memory, self.close)

    @property
    def connector(self) -> str:
        """What carries the blocks."""
        return self.pair.connector

    def send(self, message: pb.PrefillMessage) -> None:
        self._outbound.put_nowait(message)

    def close(self) -> None:
        """End the link; ``on_lost`` follows."""
        if self._task is not None:
            self._task.cancel()

    async def _outgoing(self) -> AsyncIterator[pb.PrefillMessage]:
        while (message := await self._outbound.get()) is not None:
            yield message

    async def _read(
        self,
        channel: grpc.aio.Channel,
        stream: grpc.aio.StreamStreamCall[pb.PrefillMessage, pb.DecodeMessage],
        link: LinkId,
    ) -> None:
        try:
            while isinstance(message := await stream.read(), pb.DecodeMessage):
                self.pulse.heard()
                self._on_message(link, message)
        except grpc.aio.AioRpcError as error:
            log.info("the link to decode at %s ended: %s", self.address, error.details())
        except asyncio.CancelledError:
            log.info("the link to decode at %s was closed", self.address)
        finally:
            self._outbound.put_nowait(None)
            if self.data is not None:
                await self.data.close()
            self._on_lost(self)
            await channel.close(None)
