"""Frames over a stream socket: a message, and raw bytes behind it."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from baton.parallel.messages import ToLeader, ToRank

MAX_HEADER = 1 << 20
MAX_PAYLOAD = 1 << 30
_SIZES = struct.Struct("!IQ")
Out = TypeVar("Out")
In = TypeVar("In")


class ChannelClosedError(ConnectionError):
    """The other end is gone, or broke the protocol."""


class SilentError(ChannelClosedError):
    """The socket's timeout passed without data."""


class Channel(Generic[Out, In]):
    """One end of a connection. Any thread may send; only one receives."""

    def __init__(self, sock: socket.socket, incoming: object, max_payload: int | None = None) -> None:
        """``incoming``: the union of the messages that the other end sends. ``max_payload``: most bytes
        behind a message; None: as many as a frame may hold."""
        self.sock = sock
        self._max_payload = MAX_PAYLOAD if max_payload is None else max_payload
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._sending = threading.Lock()

    def send(self, message: Out, payload: bytes | memoryview = b"") -> None:
        """Sends one frame. OSError when the other end is gone; ValueError for more than a frame may hold."""
        header = self._encoder.encode(message)
        size = len(payload) if isinstance(payload, bytes) else payload.nbytes
        if len(header) > MAX_HEADER or size > MAX_PAYLOAD:
            raise ValueError(f"a frame of {len(header)} + {size} bytes")
        with self._sending:
            self.sock.sendall(_SIZES.pack(len(header), size) + header)
            if size:
                self.sock.sendall(payload)

    def receive(self) -> tuple[In, bytearray]:
        """The next message and its payload. ChannelClosedError when the connection is over, SilentError after
        the socket's timeout."""
        header_size, size = _SIZES.unpack(self._exactly(_SIZES.size))
        if header_size > MAX_HEADER or size > self._max_payload:
            raise ChannelClosedError(f"a frame of {header_size} + {size} bytes came")
        header = self._exactly(header_size)
        try:
            message = self._decoder.decode(header)
        except msgspec.MsgspecError as error:
            raise ChannelClosedError(f"a message that is none came: {error}") from error
        return message, self._exactly(size)

    def close(self) -> None:
        """Ends both directions, even if another process has the socket too."""
        with suppress(OSError):  # the other end was first
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self.sock.recv_into(view)
            except TimeoutError as error:
                raise SilentError("it says nothing") from error
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not count:
                raise ChannelClosedError("the other end closed the connection")
            view = view[count:]
        return data


def to_ranks(sock: socket.socket) -> Channel[ToRank, ToLeader]:
    """The leader's end of a connection."""
    return Channel(sock, ToLeader)


def to_leader(sock: socket.socket) -> Channel[ToLeader, ToRank]:
    """A rank's end of a connection."""
    return Channel(sock, ToRank)
