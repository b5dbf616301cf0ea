"""What the worker's process and the process of one of its other ranks say to each other about links.

Frames of msgpack on a stream socket that the one inherited from the other, each behind its length. The worker
orders, the rank answers each order that has a ``call``, with ``Failed`` or what belongs to it. Orders take
effect in the order in which they came: an ``Expect`` or ``PostReceive`` has done so when ``InPlace`` says it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import msgspec

from baton.connector.ranks.end import Cut
from baton.connector.ranks.share import Share
from baton.tls.files import TlsFiles

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 20


class FrameError(Exception):
    """The other process says what is no frame: one of the two is broken."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One thing said. On the wire: its name and its fields, in order."""


class WireCut(msgspec.Struct, frozen=True, array_like=True):
    """``Cut``, in numbers."""

    block_size: int
    heads: tuple[int, int]
    layers: tuple[int, int]

    @staticmethod
    def of(cut: Cut) -> WireCut:
        heads, layers = cut.share.heads, cut.share.layers
        return WireCut(cut.block_size, (heads.start, heads.stop), (layers.start, layers.stop))

    def cut(self) -> Cut:
        return Cut(self.block_size, Share(range(*self.heads), range(*self.layers)))


class WireTls(msgspec.Struct, frozen=True, array_like=True):
    """``TlsFiles`` of services: where the rank finds them, which is where the worker does."""

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
    """First of all: which connectors to have, as ``choice.available`` takes it, and on what they listen."""

    connector: str
    host: str
    tls: WireTls | None = None


class Listen(_Frame, frozen=True):
    """Answered with ``Listening``."""

    call: int
    host: str
    port: int


class Expect(_Frame, frozen=True):
    """``link`` is the worker's number for it from here on. Like most orders, answered with ``Done``."""

    call: int
    link: int
    connector: str
    token: bytes
    cut: WireCut


class Connect(_Frame, frozen=True):
    call: int
    link: int
    connector: str
    address: str
    token: bytes
    cut: WireCut


class PostReceive(_Frame, frozen=True):
    """``Done`` or ``Failed`` when it is over."""

    call: int
    link: int
    tag: int
    blocks: tuple[int, ...]


class CancelReceive(_Frame, frozen=True):
    """What came of it is said by the end of the receive."""

    link: int
    tag: int


class Send(_Frame, frozen=True):
    call: int
    link: int
    tag: int
    blocks: tuple[int, ...]


class Checksum(_Frame, frozen=True):
    """Answered with ``Checked``."""

    call: int
    link: int
    blocks: tuple[int, ...]


class Close(_Frame, frozen=True):
    """``Done`` when the link is closed; be it only about to be made."""

    call: int
    link: int


Order = Begin | Listen | Expect | Connect | PostReceive | CancelReceive | Send | Checksum | Close


# --- what a rank says


class Hello(_Frame, frozen=True):
    """The answer to ``Begin``: what the rank has, and what of the model's KV its pool holds."""

    connectors: tuple[str, ...]
    drained_is_proof: bool
    heads: tuple[int, int]
    layers: tuple[int, int]
    token_bytes: int
    """Of K and V of one token in one head of one layer."""


class Unable(_Frame, frozen=True):
    """Instead of ``Hello``: the connectors cannot be had."""

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


class Failed(_Frame, frozen=True):
    call: int
    reason: str


class Lost(_Frame, frozen=True):
    """The link has ended by itself."""

    link: int


Said = Hello | Unable | Listening | InPlace | Done | Checked | Failed | Lost

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_said = msgspec.msgpack.Decoder(Said)


def encoded(frame: Order | Said) -> bytes:
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes: {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


async def orders(stream: asyncio.StreamReader) -> AsyncIterator[Order]:
    """Until the other process closes its end. Raises FrameError, and OSError."""
    async for body in _bodies(stream):
        try:
            yield _orders.decode(body)
        except msgspec.MsgspecError as error:
            raise FrameError(f"no order: {error}") from error


async def said(stream: asyncio.StreamReader) -> AsyncIterator[Said]:
    """Likewise."""
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
