"""A fix for gRPC's wakeups of a busy event loop.

grpcio hands the events of its C core to asyncio through a queue, and writes a byte into a socket for each
event. The loop's callback reads one byte and then handles every event in the queue. While the loop is busy,
several events come between two callbacks, and bytes are left in the socket. With some 270 bytes the socket is
full, and the thread that writes blocks: from then on there is one event for each iteration of the loop,
however long that takes. A router to which 2,000 clients connected at once read nothing from its workers for
seconds and took them for silent.
"""

from __future__ import annotations

import socket

import grpc

_MANY = 4096
_socketpair = socket.socketpair


class _Drained(socket.socket):
    """The reading end. A read of one byte takes all bytes: the reader then handles every event anyway."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(max(bufsize, _MANY), flags)


def _pair() -> tuple[socket.socket, socket.socket]:
    reading, writing = _socketpair()
    return _Drained(reading.family, reading.type, reading.proto, reading.detach()), writing


def take_all() -> None:
    """Have grpc.aio read all wakeup bytes at once, for the life of the process. Call it before any other
    function of grpc.aio: a socket that exists already stays as it is."""
    socket.socketpair = _pair  # type: ignore[assignment]  # it is called without arguments
    try:
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # public, but not in the stubs
    finally:
        socket.socketpair = _socketpair
