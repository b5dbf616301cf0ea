"""The bytes of a data connection, in order, as a thread that may wait moves them: plain, or under TLS.

The owner of a stream reads and writes through the stream alone. The socket below is there to be watched and
shut down.
"""

from __future__ import annotations

import socket
from typing import Protocol

from baton.net.tls_session import TlsSession
from baton.transport.base import TransferError

_MAX_VIEWS = 1024
"""Most buffers of one system call: IOV_MAX of Linux."""
_TLS_BYTES = 512 << 10
"""Most bytes of ciphertext of one system call: more is no faster (docs/security.md)."""


class Stream(Protocol):
    """One end of a data connection. Its socket blocks. Methods raise OSError when the connection breaks."""

    @property
    def sock(self) -> socket.socket: ...

    def read_into(self, views: list[memoryview]) -> None:
        """Fill the views. Raises TransferError when the peer closes the connection before."""

    def write(self, views: list[memoryview]) -> None:
        """Send all bytes of the views."""


class PlainStream:
    """A stream without encryption: nothing is copied between pages and socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def read_into(self, views: list[memoryview]) -> None:
        read_into(self.sock, views)

    def write(self, views: list[memoryview]) -> None:
        while views:
            views = _rest(views, self.sock.sendmsg(views[:_MAX_VIEWS]))


class TlsStream:
    """A stream under TLS: records are made and opened in memory beside the socket, many for each system
    call."""

    def __init__(self, sock: socket.socket, session: TlsSession) -> None:
        self.sock = sock
        self._session = session
        self._arrived = memoryview(bytearray(_TLS_BYTES))

    def read_into(self, views: list[memoryview]) -> None:
        for view in views:
            while view.nbytes:
                count = self._session.read_into(view)
                if count is None:
                    self._hear()
                elif count == 0:
                    raise TransferError("the peer closed the connection")
                else:
                    view = view[count:]

    def _hear(self) -> None:
        count = self.sock.recv_into(self._arrived)
        if count == 0:
            raise TransferError("the peer closed the connection")
        self._session.feed(self._arrived[:count])

    def write(self, views: list[memoryview]) -> None:
        waiting = 0
        for view in views:
            for at in range(0, view.nbytes, _TLS_BYTES):
                part = view[at : at + _TLS_BYTES]
                self._session.write(part)
                waiting += part.nbytes
                if waiting >= _TLS_BYTES:
                    self.sock.sendall(self._session.take())
                    waiting = 0
        if waiting:
            self.sock.sendall(self._session.take())


def read_into(sock: socket.socket, views: list[memoryview]) -> None:
    """Fill the views, from a socket that blocks. Raises TransferError when the peer closes it before."""
    while views:
        count, _, _, _ = sock.recvmsg_into(views[:_MAX_VIEWS], 0, socket.MSG_WAITALL)
        if count == 0:
            raise TransferError("the peer closed the connection")
        views = _rest(views, count)


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of ``views`` after ``done`` bytes."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []
