"""A store by which the two ends of a link find each other's process group, over the link's own socket.

Torch's libraries exchange addresses through a key-value store. Torch's own store, over TCP, is another port
without authentication, and its ends ask DNS for each other's names: where DNS does not answer, they find each
other ten seconds later, or not at all. Two ranks need no server: each end tells the other what it sets.

This module imports torch; a module that must be importable without torch may not import it at its top.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from baton.transport.base import TransferError
from baton.transport.stream import read_into

_FRAME = struct.Struct("!HI")
"""The sizes in bytes of the key and of the value that follow. A key of size 0: the peer has left."""
_MAX_KEY_BYTES, _MAX_VALUE_BYTES = 1 << 10, 1 << 16
"""Most bytes of a key and of a value. Libraries need some hundred bytes."""
_MAX_KEYS = 64
"""Most keys of a peer. Libraries set one or two."""


class LinkStore(Store):
    """A store of two ranks, for one thread. Its methods are the ones that torch calls.

    Methods raise TransferError when the peer has gone, or does not set in time a key that is waited for;
    OSError as sockets do. From its making to the end of ``leave`` the store owns the socket, which blocks.
    """

    def __init__(self, sock: socket.socket, patience_s: float) -> None:
        """``patience_s``: the time until the peer has left as well, in seconds, whatever timeout torch asks
        for."""
        super().__init__()
        self._sock = sock
        self._ends_at = time.monotonic() + patience_s
        self._said: dict[str, bytes] = {}
        self._left = self._peer_left = False

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._said[key] = data
        if not self._left:  # once both have left, a library keeps keys of its own here
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
        """Tell the peer that this end needs nothing more, and wait until the peer says the same. The socket
        is then free for other things, with no byte of the store left in it."""
        self._left = True
        self._say(b"", b"")
        while not self._peer_left:
            self._hear()

    def _say(self, key: bytes, value: bytes) -> None:
        self._sock.sendall(_FRAME.pack(len(key), len(value)) + key + value)

    def _hear(self) -> None:
        """Read the next key and value that the peer sets."""
        if self._peer_left:
            raise TransferError("the peer has left a meeting of which more was expected")
        patience = select.poll()
        patience.register(self._sock, select.POLLIN)
        if not patience.poll(max(0.0, self._ends_at - time.monotonic()) * 1e3):
            raise TransferError("the peer did not come to a meeting in time")
        key_bytes, value_bytes = _FRAME.unpack(self._read(_FRAME.size))
        if key_bytes > _MAX_KEY_BYTES or value_bytes > _MAX_VALUE_BYTES:
            raise TransferError(f"a meeting is no place for {key_bytes} + {value_bytes} bytes")
        if len(self._said) >= _MAX_KEYS:
            raise TransferError(f"more than {_MAX_KEYS} things were said at a meeting")
        key, value = self._read(key_bytes), self._read(value_bytes)
        self._peer_left = not key
        self._said[key.decode(errors="replace")] = value

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        read_into(self._sock, [memoryview(data)] if data else [])
        return bytes(data)
