"""Server-sent events out of the pieces of a body."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Cuts pieces, which end anywhere, into the data of whole events. Comments and other fields are passed
    over; lines end in LF or CR LF; an event's data is one line, as all servers send it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
