"""gRPC events that keep coming while the event loop is busy.

grpcio hands the events of its C core to asyncio through a queue, and writes a byte into a socket for each of
them; the loop's callback takes one byte and then every event there is. Where the loop is busy, several events
come between two callbacks, and bytes stay behind. Once some 270 do, the socket is full, and the thread that
writes them waits: from then on there is one event for each turn of the loop, however long its turns are. A
router that 2,000 clients came to at once read nothing of its workers for seconds and took them for silent.
"""

from __future__ import annotations

import socket

import grpc

_MANY = 4096
_socketpair = socket.socketpair


class _Drained(socket.socket):
    """The reading end. Whoever takes one byte takes all of them: every event is handled then anyway."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(max(bufsize, _MANY), flags)


def _pair() -> tuple[socket.socket, socket.socket]:
    reading, writing = _socketpair()
    return _Drained(reading.family, reading.type, reading.proto, reading.detach()), writing


def take_all() -> None:
    """Make gRPC's asyncio side so, for the life of the process. To be called before anything else of it is:
    what it has set up already stays as it is."""
    socket.socketpair = _pair  # type: ignore[assignment]  # it is called without arguments
    try:
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # public, but not in the stubs
    finally:
        socket.socketpair = _socketpair
