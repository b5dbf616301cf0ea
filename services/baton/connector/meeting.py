"""How the two ends of a link find each other's process group: over the socket that they have already.

Torch's libraries meet at a key-value store. Torch's own, over TCP, is another port, which asks nobody
anything, and its ends ask DNS for each other's names: where DNS is silent, they find each other ten seconds
later, or not at all. Two ranks need no server: what one sets, the other is told.

This imports torch; nothing that must be importable without it may import this at its top.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from baton.connector.stream import read_into
from baton.connector.transport import TransferError

_FRAME = struct.Struct("!HI")
"""Bytes of a key and of its value, which follow. No key: whoever said it has left."""
_MOST_KEY_BYTES, _MOST_VALUE_BYTES = 1 << 10, 1 << 16
"""Libraries say some hundred bytes."""
_MOST_KEYS = 64
"""They say one or two things each."""


class Meeting(Store):
    """A store of two ranks, for one thread. Its methods are those that torch calls.

    Raises TransferError when the peer has gone, or does not say in time what somebody waits for; OSError as
    sockets do. Between its making and the end of ``leave`` the socket, which blocks, is its own.
    """

    def __init__(self, sock: socket.socket, patience_s: float) -> None:
        """``patience_s``: until the peer has left as well, whatever torch would wait."""
        super().__init__()
        self._sock = sock
        self._ends_at = time.monotonic() + patience_s
        self._said: dict[str, bytes] = {}
        self._left = self._peer_left = False

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._said[key] = data
        if not self._left:  # afterwards, a library notes things of its own here
            self._say(key.encode(), data)

    def get(self, key: str) -> bytes:
        while key not in self._said:
            self._hear()
        return self._said[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._said for key in keys)

    def leave(self) -> None:
        """This end has all it needs. When the peer has too, the socket is free for other things: nothing that
        was said here is left in it."""
        self._left = True
        self._say(b"", b"")
        while not self._peer_left:
            self._hear()

    def _say(self, key: bytes, value: bytes) -> None:
        self._sock.sendall(_FRAME.pack(len(key), len(value)) + key + value)

    def _hear(self) -> None:
        """The next thing that the peer says."""
        if self._peer_left:
            raise TransferError("the peer has left a meeting of which more was expected")
        patience = select.poll()
        patience.register(self._sock, select.POLLIN)
        if not patience.poll(max(0.0, self._ends_at - time.monotonic()) * 1e3):
            raise TransferError("the peer did not come to a meeting in time")
        key_bytes, value_bytes = _FRAME.unpack(self._read(_FRAME.size))
        if key_bytes > _MOST_KEY_BYTES or value_bytes > _MOST_VALUE_BYTES:
            raise TransferError(f"a meeting is no place for {key_bytes} + {value_bytes} bytes")
        if len(self._said) >= _MOST_KEYS:
            raise TransferError(f"more than {_MOST_KEYS} things were said at a meeting")
        key, value = self._read(key_bytes), self._read(value_bytes)
        self._peer_left = not key
        self._said[key.decode(errors="replace")] = value

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        read_into(self._sock, [memoryview(data)] if data else [])
        return bytes(data)
