"""The lines on standard output by which a service tells its supervisor how far its start is.

``baton up`` reads the lines, and so can any other supervisor. All other output of a service goes to standard
error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TextIO

import orjson

READY = "BATON_READY "
PROGRESS = "BATON_PROGRESS "
SIZES = "BATON_SIZES "


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has its model in memory and accepts routers. Addresses are ``host:port``."""

    address: str
    role: str
    metrics: str | None = None


@dataclass(frozen=True, slots=True)
class RouterReady:
    """The router accepts clients. Addresses are ``host:port``."""

    http: str
    grpc: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A part of a stage is done: ``"load"``, in bytes of weights, or ``"capture"``, in steps recorded as
    graphs. A total of 0 is unknown."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ChosenSizes:
    """The sizes of a worker's blocks and steps, which its options may leave open, and their reasons."""

    text: str


Message = WorkerReady | RouterReady | Progress | ChosenSizes


def announce(message: Message, stream: TextIO | None = None) -> None:
    """Print ``message`` as one line and flush: a supervisor's pipe would buffer it otherwise."""
    marker = _marker(message)
    print(marker + orjson.dumps(asdict(message)).decode(), file=stream or sys.stdout, flush=True)


def parse(line: str) -> Message | None:
    """Return the message of a line, or None for a line that is not of this protocol."""
    for marker in (READY, PROGRESS, SIZES):
        if line.startswith(marker):
            try:
                return _message(marker, orjson.loads(line.removeprefix(marker)))
            except (orjson.JSONDecodeError, TypeError):
                return None
    return None


def _marker(message: Message) -> str:
    match message:
        case Progress():
            return PROGRESS
        case ChosenSizes():
            return SIZES
        case _:
            return READY


def _message(marker: str, fields: dict[str, object]) -> Message:
    # The constructors check the names. The types are not checked: the sender is our own process.
    kind: Callable[..., Message] = RouterReady if "http" in fields else WorkerReady
    if marker != READY:
        kind = Progress if marker == PROGRESS else ChosenSizes
    return kind(**fields)
