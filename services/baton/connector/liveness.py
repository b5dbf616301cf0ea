"""Finding silent peers: a heartbeat each way on every link, and how long silence may last.

A process that is killed closes its sockets and is found at once. One that is stopped, or behind a network
that drops packets, says nothing: only its silence can be noticed. The transport's keepalive is too slow for
that, and it answers from the kernel while the process behind it is stopped.
"""

from __future__ import annotations

HEARTBEAT_S = 0.5
BUSY_SILENCE_S = 2.0
"""For a link with open handoffs: their pages are pinned until the link is given up."""
IDLE_SILENCE_S = 10.0
MOST_PER_TICK_S = 0.3
"""Silence counts by the ticks of our own timer. Where a tick comes late, it was we who did not listen:
stopped, starved, or suspended."""


class Pulse:
    """One link's heartbeat, ours and the peer's."""

    def __init__(self) -> None:
        self._silence = 0.0
        self._since_sent = 0.0

    def heard(self) -> None:
        """The peer said something, whatever it was."""
        self._silence = 0.0

    def tick(self, elapsed: float) -> bool:
        """``elapsed`` seconds went by since the last tick. True: it is time to send a heartbeat."""
        self._silence += min(elapsed, MOST_PER_TICK_S)
        self._since_sent += elapsed
        if self._since_sent < HEARTBEAT_S:
            return False
        self._since_sent = 0.0
        return True

    def lost(self, *, busy: bool) -> bool:
        """Whether the peer has been silent for too long."""
        return self._silence >= (BUSY_SILENCE_S if busy else IDLE_SILENCE_S)
