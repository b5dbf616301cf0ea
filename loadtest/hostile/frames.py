"""HTTP/2 by hand: frames that no library would send."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
CANCEL = 8
HEAD_BYTES = 9


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return one frame. ``payload`` is shorter than 16 MiB."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(values: Mapping[int, int] | None = None, *, ack: bool = False) -> bytes:
    payload = b"".join(struct.pack(">HI", name, value) for name, value in (values or {}).items())
    return frame(SETTINGS, ACK if ack else 0, 0, payload)


def ping(number: int, *, ack: bool = False) -> bytes:
    return frame(PING, ACK if ack else 0, 0, struct.pack(">Q", number))


def reset(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def window_update(stream: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


def headers(stream: int, block: bytes, *, whole: bool = True, end: bool = False) -> bytes:
    """Return a HEADERS frame. ``whole``: no CONTINUATION follows. ``end``: no body follows."""
    return frame(HEADERS, (END_HEADERS if whole else 0) | (END_STREAM if end else 0), stream, block)


def continuation(stream: int, block: bytes, *, whole: bool = False) -> bytes:
    return frame(CONTINUATION, END_HEADERS if whole else 0, stream, block)


def data(stream: int, payload: bytes, *, end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end else 0, stream, payload)


def hpack_integer(value: int, prefix_bits: int, first: int = 0) -> bytes:
    """Encode an integer as RFC 7541, 5.1, does. ``first``: the bits before the prefix."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes([first | value])
    out, value = bytearray([first | most]), value - most
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(name: str, value: str) -> bytes:
    """Return a literal header field, without indexing and without Huffman coding."""
    texts = (name.encode(), value.encode())
    return b"\x00" + b"".join(hpack_integer(len(text), 7) + text for text in texts)


def block(fields: Iterable[tuple[str, str]]) -> bytes:
    return b"".join(field(name, value) for name, value in fields)


def grpc_head(path: str, authority: str = "127.0.0.1", more: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return the header block of a call."""
    return block(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *more,
        ]
    )


def grpc_message(payload: bytes) -> bytes:
    return struct.pack(">BI", 0, len(payload)) + payload


def varint(value: int) -> bytes:
    """Encode an integer as protobuf does."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def part(number: int, payload: bytes) -> bytes:
    """Return a protobuf field of bytes, text or a message."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def parts(message: bytes) -> dict[int, bytes]:
    """Return the fields of a protobuf message that has only bytes, text and messages: the last one by number.
    Raises ValueError for other bytes."""
    found: dict[int, bytes] = {}
    rest = message
    while rest:
        tag, rest = _read_varint(rest)
        size, rest = _read_varint(rest)
        if tag & 7 != 2 or size > len(rest):
            raise ValueError("no message of such fields only")
        found[tag >> 3], rest = rest[:size], rest[size:]
    return found


def _read_varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for at, byte in enumerate(data):
        value |= (byte & 127) << (7 * at)
        if byte < 128:
            return value, data[at + 1 :]
    raise ValueError("cut short")


class Parser:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete by now."""
        self._rest += data
        while len(self._rest) >= HEAD_BYTES:
            size = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < HEAD_BYTES + size:
                return
            kind, flags, stream = struct.unpack(">BBI", self._rest[3:HEAD_BYTES])
            payload = self._rest[HEAD_BYTES : HEAD_BYTES + size]
            self._rest = self._rest[HEAD_BYTES + size :]
            yield Frame(kind, flags, stream & 0x7FFFFFFF, payload)
