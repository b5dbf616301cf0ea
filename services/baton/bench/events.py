"""A reader of server-sent events from the pieces of a body."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Splits a body, in pieces that end anywhere, into the data of whole events. Comments and other fields
    are skipped; lines end in LF or CR LF; an event's data is one line, as all servers send it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
