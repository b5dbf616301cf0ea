"""The frames about links that the worker's process and the process of one of its other ranks exchange.

Frames of msgpack on a stream socket that the rank's process inherits, each behind its length. The worker
orders; the rank answers each order that has a ``call``, with ``FailedFrame`` or the order's own answer.
Orders take effect in the order in which they came: an ``ExpectFrame`` or ``PostReceiveFrame`` has done so
when ``InPlace`` says it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import msgspec

from baton.net.certificates import TlsFiles
from baton.transport.base import GroupPart
from baton.transport.ranks.endpoint import ChannelShape
from baton.transport.ranks.shard import KVShard

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 20


class FrameError(Exception):
    """The other process sent what is no frame: one of the two is broken."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=lambda name: name.removesuffix("Frame")):
    """A frame. On the wire: its name and its fields, in order."""


class WirePart(msgspec.Struct, frozen=True, array_like=True):
    """``GroupPart``, in numbers."""

    heads: tuple[int, int]
    layers: tuple[int, int]


class WireShape(msgspec.Struct, frozen=True, array_like=True):
    """``ChannelShape``, in numbers."""

    block_size: int
    parts: tuple[WirePart, ...]
    arrives_as: str = ""

    @staticmethod
    def of(cut: ChannelShape) -> WireShape:
        return WireShape(cut.block_size, wire_parts(cut.share), cut.arrives_as)

    def cut(self) -> ChannelShape:
        return ChannelShape(self.block_size, shard_of_parts(self.parts), self.arrives_as)


def wire_parts(share: KVShard) -> tuple[WirePart, ...]:
    return tuple(
        WirePart((part.heads.start, part.heads.stop), (part.layers.start, part.layers.stop))
        for part in share.groups
    )


def shard_of_parts(parts: tuple[WirePart, ...]) -> KVShard:
    return KVShard(tuple(GroupPart(range(*part.heads), range(*part.layers)) for part in parts))


class CellForm(msgspec.Struct, frozen=True, array_like=True):
    """The form of one KV group in a rank's pool."""

    tables: int
    """The pages of a block."""
    numbers: int
    """What one head of one layer keeps of a token or, of a state, of a sequence."""
    element_bytes: int
    """The size of a number."""
    scale_bytes: int
    """The size of the scales of a block, of one head of one layer."""
    is_state: bool


class WireTls(msgspec.Struct, frozen=True, array_like=True):
    """``TlsFiles`` of services: paths that are the same for the rank and for the worker."""

    certificate: str
    key: str
    ca: str | None
    server_name: str | None

    @staticmethod
    def of(files: TlsFiles) -> WireTls:
        return WireTls(files.certificate, files.key, files.ca, files.server_name)

    def files(self) -> TlsFiles:
        return TlsFiles(
            options="worker_tls",
            certificate=self.certificate,
            key=self.key,
            ca=self.ca,
            mutual=True,
            server_name=self.server_name,
        )


# --- orders of the worker


class Begin(_Frame, frozen=True):
    """The first order: which connectors to make, as ``registry.available`` takes it, and on what host to
    listen."""

    connector: str
    host: str
    tls: WireTls | None = None
    require_rdma: bool = False


class Listen(_Frame, frozen=True):
    """Listen; answered with ``Listening``."""

    call: int
    host: str
    port: int


class ExpectFrame(_Frame, frozen=True):
    """Expect a peer. ``link`` is the worker's number for the link from here on. Answered with ``Done``, as
    most orders are."""

    call: int
    link: int
    connector: str
    token: bytes
    cut: WireShape


class ConnectFrame(_Frame, frozen=True):
    call: int
    link: int
    connector: str
    address: str
    token: bytes
    cut: WireShape


class PostReceiveFrame(_Frame, frozen=True):
    """Post a receive; answered with ``Done`` or ``FailedFrame`` when the receive is over."""

    call: int
    link: int
    tag: int
    blocks: tuple[int, ...]


class CancelReceiveFrame(_Frame, frozen=True):
    """Withdraw a receive, if no message has matched it; the end of the receive tells whether it was."""

    link: int
    tag: int


class SendFrame(_Frame, frozen=True):
    call: int
    link: int
    tag: int
    blocks: tuple[int, ...]


class Checksum(_Frame, frozen=True):
    """Compute a checksum; answered with ``Checked``."""

    call: int
    link: int
    blocks: tuple[int, ...]


class Close(_Frame, frozen=True):
    """Close a link, even one that is still being made; answered with ``Done`` when it is closed."""

    call: int
    link: int


Order = (
    Begin
    | Listen
    | ExpectFrame
    | ConnectFrame
    | PostReceiveFrame
    | CancelReceiveFrame
    | SendFrame
    | Checksum
    | Close
)


# --- frames of a rank


class Hello(_Frame, frozen=True):
    """The answer to ``Begin``: the connectors that the rank has, and the part of the model's KV that its pool
    holds."""

    connectors: tuple[str, ...]
    drained_is_proof: bool
    parts: tuple[WirePart, ...]
    forms: tuple[CellForm, ...]


class Unable(_Frame, frozen=True):
    """The other answer to ``Begin``: the connectors cannot be made."""

    reason: str


class Listening(_Frame, frozen=True):
    call: int
    addresses: dict[str, str]


class InPlace(_Frame, frozen=True):
    """This order and all before it have taken effect."""

    call: int


class Done(_Frame, frozen=True):
    call: int


class Checked(_Frame, frozen=True):
    call: int
    crc: int


class FailedFrame(_Frame, frozen=True):
    call: int
    reason: str


class Lost(_Frame, frozen=True):
    """The link has ended by itself."""

    link: int


Said = Hello | Unable | Listening | InPlace | Done | Checked | FailedFrame | Lost

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_said = msgspec.msgpack.Decoder(Said)


def encoded(frame: Order | Said) -> bytes:
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes: {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


async def orders(stream: asyncio.StreamReader) -> AsyncIterator[Order]:
    """Yield the worker's orders until the worker closes its end. Raises FrameError, and OSError."""
    async for body in _bodies(stream):
        try:
            yield _orders.decode(body)
        except msgspec.MsgspecError as error:
            raise FrameError(f"no order: {error}") from error


async def said(stream: asyncio.StreamReader) -> AsyncIterator[Said]:
    """Yield the rank's frames until the rank closes its end. Raises FrameError, and OSError."""
    async for body in _bodies(stream):
        try:
            yield _said.decode(body)
        except msgspec.MsgspecError as error:
            raise FrameError(f"no word of a rank: {error}") from error


async def _bodies(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        try:
            (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes: {MAX_FRAME_BYTES} are allowed")
            body = await stream.readexactly(length)
        except asyncio.IncompleteReadError:
            return
        yield body
