"""The TCP connections between processes that we started, and cutting them from outside.

A socket is cut through a duplicate of its descriptor (``pidfd_getfd``, Linux 5.6), so it is the very
connection that is lost, whatever library owns it; nothing stands in between while it works. A parent may do
that to its children, except where a container forbids it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

_Address = tuple[str, int]
_Route = tuple[_Address, _Address]
Manner = Literal["end", "reset"]
MANNERS: tuple[Manner, ...] = ("end", "reset")
_PIDFD_GETFD = 438  # the same on every architecture
_SO_MAX_PACING_RATE = 47
_AF_UNSPEC = 0


@dataclass(frozen=True)
class End:
    """A process's descriptor of a connected socket."""

    pid: int
    fd: int
    inode: str
    port: int

    @property
    def open(self) -> bool:
        """Whether the process still has this very socket open."""
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/{self.pid}/fd/{self.fd}").readlink()) == self.inode
        return False


@dataclass(frozen=True)
class Connection:
    """An established connection between two processes of ours, on this machine."""

    ends: tuple[End, End]

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(end.pid for end in self.ends)

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(end.port for end in self.ends)

    @property
    def gone(self) -> bool:
        """Whether both processes have closed it."""
        return not any(end.open for end in self.ends)

    @property
    def established(self) -> bool:
        """Whether bytes can still go through."""
        inodes = {end.inode for end in self.ends}
        return any(end.inode in inodes for pid in self.pids for end in _ends(pid).values())

    def pace(self, bytes_per_second: int) -> None:
        """Let no more than this through, either way. OSError as for ``cut``."""
        for end in self.ends:
            with _duplicate(end) as sock:
                sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", bytes_per_second))

    def cut(self, manner: Manner, at: int = 0) -> None:
        """Break the connection at one of its ends. ``end``: both directions are shut down, what was sent
        still arrives; ``reset``: what is on its way is lost. OSError when the process has closed it, or is
        dead."""
        end = self.ends[at]
        with _duplicate(end) as sock:
            if manner == "end":
                sock.shutdown(socket.SHUT_RDWR)
            else:
                _disconnect(sock)


def why_not() -> str | None:
    """Why connections cannot be cut here, or None if they can."""
    if not sys.platform.startswith("linux"):
        return "connections can be cut on Linux only"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        try:
            with _duplicate(End(os.getpid(), probe.fileno(), "", 0)):
                return None
        except OSError as error:
            return f"pidfd_getfd does not work here: {error.strerror}"


def between(pids: Iterable[int]) -> list[Connection]:
    """Every established connection of which both ends are among these processes, no process with itself."""
    ends: dict[_Route, End] = {}
    for pid in pids:
        ends |= _ends(pid)
    pairs = [(end, ends.get((remote, local))) for (local, remote), end in ends.items()]
    return [Connection((end, other)) for end, other in pairs if other is not None and end.pid < other.pid]


def _ends(pid: int) -> dict[_Route, End]:
    """The process's established connections, by (its address, the peer's)."""
    ends = {}
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # ended, or closed one just now
        for found in psutil.Process(pid).net_connections(kind="tcp"):
            if found.status == psutil.CONN_ESTABLISHED:
                inode = str(Path(f"/proc/{pid}/fd/{found.fd}").readlink())
                ends[_plain(found.laddr), _plain(found.raddr)] = End(pid, found.fd, inode, found.laddr.port)
    return ends


def _plain(address: _Address) -> _Address:
    host, port = address
    return host.removeprefix("::ffff:"), port


def _duplicate(end: End) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(end.pid)
    try:
        fd = libc.syscall(_PIDFD_GETFD, process, end.fd, 0)
    finally:
        os.close(process)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    sock = socket.socket(fileno=fd)
    # The number may be another file by now.
    if end.inode and str(Path(f"/proc/self/fd/{fd}").readlink()) != end.inode:
        sock.close()
        raise OSError("the process has closed this connection")
    return sock


def _disconnect(sock: socket.socket) -> None:
    """Connect to "unspecified", which tells the peer by a reset. Python's own connect cannot say that."""
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = _AF_UNSPEC.to_bytes(2, sys.byteorder) + bytes(14)
    if libc.connect(sock.fileno(), nowhere, len(nowhere)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
