"""What one process of a router is told of itself."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """One among several."""

    index: int
    count: int
    listener: socket.socket
    """For HTTP: its own, on the port of all. The parent has it too, so that what waits there is not lost with
    the process."""
    directory: Path
    """Where the processes hear each other. Nobody else may enter."""
    restarts: int
    """How many had this place before."""
    beat: Callable[[], None]
    """To be called every second or so, or the process is taken to hang."""
    tell_ready: Callable[[], None]
