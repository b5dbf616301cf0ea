"""What the two ends of a ``nixl`` link say to each other on its socket, and in NIXL's notifications.

Every frame is a head of one size, with what its kind brings behind it. Numbers are in network order.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from baton.transport.base import TransferError
from baton.transport.nixl_agent import HOST, MAX_METADATA, AddressRange, MemoryKind
from baton.transport.stream import read_into

_HEAD = struct.Struct("!B?HIQQQ")
_SPAN = struct.Struct("!QQ")
_NOTICE = struct.Struct("!QQQ")
_MAX_SPANS = 1 << 20
"""Most spans of a place: those of a pool of a million blocks."""


class FrameKind(enum.IntEnum):
    """``METADATA``, ``PLACE``, ``REFUSED`` and ``LANDED`` come from decode, the others from prefill."""

    METADATA = 1
    """Memory that prefill may write to, in NIXL's own format."""
    ANNOUNCE = 2
    """A message of ``length`` bytes waits."""
    PLACE = 3
    """Says where the ``length`` bytes of a message from ``offset`` on go."""
    WRITTEN = 4
    """A notice of a message is on its way, or there."""
    LANDED = 5
    """All bytes of a message are in their pages, and nothing is left to be done."""
    REFUSED = 6
    """Nobody waits for a message: none of its bytes is taken."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    tag: int = 0
    offset: int = 0
    length: int = 0
    memory: MemoryKind = HOST
    spans: Sequence[AddressRange] = ()
    metadata: bytes = b""


def send_frame(sock: socket.socket, frame: Frame) -> None:
    device = frame.memory.device
    count = len(frame.metadata) or len(frame.spans)
    head = _HEAD.pack(
        frame.kind, device is not None, device or 0, count, frame.tag, frame.offset, frame.length
    )
    spans = b"".join(_SPAN.pack(span.address, span.nbytes) for span in frame.spans)
    sock.sendall(head + spans + frame.metadata)


def read_frame(sock: socket.socket, allowed: Sequence[FrameKind]) -> Frame:
    """Read a frame of one of the ``allowed`` kinds from a socket that blocks. Raises TransferError for
    anything else."""
    kind, on_device, device, count, tag, offset, length = _HEAD.unpack(_read(sock, _HEAD.size))
    if kind not in allowed:
        raise TransferError(f"the peer sent a frame of kind {kind}")
    memory = MemoryKind(device if on_device else None)
    if kind == FrameKind.METADATA:
        if count > MAX_METADATA:
            raise TransferError(f"the peer's NIXL metadata has {count} bytes, more than {MAX_METADATA}")
        return Frame(FrameKind.METADATA, metadata=_read(sock, count))
    if kind != FrameKind.PLACE:
        return Frame(FrameKind(kind), tag, offset, length)
    if count > _MAX_SPANS:
        raise TransferError(f"the peer names {count} places for a message, more than {_MAX_SPANS}")
    spans = [AddressRange(*span) for span in _SPAN.iter_unpack(_read(sock, count * _SPAN.size))]
    return Frame(FrameKind.PLACE, tag, offset, length, memory, spans)


def _read(sock: socket.socket, size: int) -> bytes:
    received = bytearray(size)
    if size:
        read_into(sock, [memoryview(received)])
    return bytes(received)


@dataclass(frozen=True, slots=True)
class Notice:
    """What a notification of NIXL says: these bytes of a message have been written."""

    tag: int
    offset: int
    length: int

    def packed(self) -> bytes:
        return _NOTICE.pack(self.tag, self.offset, self.length)

    @classmethod
    def of(cls, packed: bytes) -> Notice:
        """Raises TransferError for what ``packed`` did not make."""
        if len(packed) != _NOTICE.size:
            raise TransferError(f"a NIXL notification has {len(packed)} bytes")
        return cls(*_NOTICE.unpack(packed))


def cut(spans: Sequence[AddressRange], start: int, length: int) -> list[AddressRange]:
    """Return ``length`` bytes of ``spans`` from the byte ``start`` on."""
    found: list[AddressRange] = []
    for span in spans:
        if start >= span.nbytes:
            start -= span.nbytes
            continue
        if length == 0:
            break
        size = min(span.nbytes - start, length)
        found.append(AddressRange(span.address + start, size))
        start, length = 0, length - size
    return found


def paired(
    ours: Sequence[AddressRange], theirs: Sequence[AddressRange]
) -> tuple[list[AddressRange], list[AddressRange]]:
    """Cut two lists of spans of equal length in all so that span goes to span."""
    left: list[AddressRange] = []
    right: list[AddressRange] = []
    at = [0, 0]
    done = [0, 0]
    while at[0] < len(ours) and at[1] < len(theirs):
        mine, other = ours[at[0]], theirs[at[1]]
        size = min(mine.nbytes - done[0], other.nbytes - done[1])
        left.append(AddressRange(mine.address + done[0], size))
        right.append(AddressRange(other.address + done[1], size))
        for side, span in enumerate((mine, other)):
            done[side] += size
            if done[side] == span.nbytes:
                at[side], done[side] = at[side] + 1, 0
    return left, right
