"""How a service tells whoever started it how far it is: single lines on standard output.

``baton up`` reads them, and so can any other supervisor. Everything else a service has to say goes to
standard error.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TextIO

import orjson

READY = "BATON_READY "
PROGRESS = "BATON_PROGRESS "


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
    """Part of a stage (``"load"``: bytes of weights) is done. A total of 0 is one not known."""

    stage: str
    done: int
    total: int


Message = WorkerReady | RouterReady | Progress


def announce(message: Message, stream: TextIO | None = None) -> None:
    """Print ``message`` as one line, at once: a supervisor's pipe would hold it back otherwise."""
    marker = PROGRESS if isinstance(message, Progress) else READY
    print(marker + orjson.dumps(asdict(message)).decode(), file=stream or sys.stdout, flush=True)


def parse(line: str) -> Message | None:
    """What a line says, or None for a line that is not of this protocol."""
    for marker in (READY, PROGRESS):
        if line.startswith(marker):
            try:
                return _message(marker, orjson.loads(line.removeprefix(marker)))
            except (orjson.JSONDecodeError, TypeError):
                return None
    return None


def _message(marker: str, fields: dict[str, object]) -> Message:
    # The constructors check the names; the sender is our own process, so the types are its word.
    kind = Progress if marker == PROGRESS else RouterReady if "http" in fields else WorkerReady
    return kind(**fields)  # type: ignore[arg-type]
