"""The slot of one process of a router: its number, its listener, and its calls to the parent."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessSlot:
    """The slot of one of several processes."""

    index: int
    count: int
    listener: socket.socket
    """The process's own HTTP listener, on the common port. The parent holds it too, so that connections that
    wait there survive the process."""
    directory: Path
    """The directory of the processes' Unix sockets. Only their user may enter."""
    restarts: int
    """The number of processes that had this slot before."""
    beat: Callable[[], None]
    """Must be called about every second, or the process is taken to hang."""
    tell_ready: Callable[[], None]
