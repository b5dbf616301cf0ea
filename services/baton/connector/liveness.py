"""Finding silent peers: a heartbeat each way on every link and stream, and how long silence may last.

A process that is killed closes its sockets and is found at once. One that is stopped, or behind a network
that drops packets, says nothing: only its silence can be noticed. The transport's keepalive is too slow for
that, and it answers from the kernel while the process behind it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HEARTBEAT_S = 0.5
BUSY_SILENCE_S = 2.0
"""For a peer with something open there: pages are pinned, or clients wait, until it is given up."""
IDLE_SILENCE_S = 10.0
TICK_S = 0.1
"""How often whoever has peers looks at their pulses."""
MOST_PER_TICK_S = 0.3
"""Silence counts by the ticks of our own timer. Where a tick comes late, it was we who did not listen:
stopped, starved, or suspended."""

NO_PROBES = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 20))
"""Options of gRPC, for both ends of a router's stream to a worker. To find out the bandwidth of a stream it
would ping when data comes, on each of hundreds whose frames are small. What is large (a snapshot of blocks)
has a window of its own."""


@dataclass(frozen=True, slots=True)
class Tempo:
    """How often peers speak and how long they may be silent, in seconds."""

    heartbeat_s: float = HEARTBEAT_S
    busy_silence_s: float = BUSY_SILENCE_S
    idle_silence_s: float = IDLE_SILENCE_S


TEMPO = Tempo()


class OwnTime:
    """Seconds in which this process could act, by the ticks of its own timer. Time in which it was stopped,
    starved or suspended does not count: what is due by then may be here, and only not heard yet."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._passed = 0.0

    def tick(self, now: float) -> float:
        """Returns how many of the seconds since the last tick do not count."""
        elapsed = now - self._ticked_at
        counted = min(elapsed, MOST_PER_TICK_S)
        self._ticked_at = now
        self._passed += counted
        return elapsed - counted

    def at(self, now: float) -> float:
        return self._passed + min(now - self._ticked_at, MOST_PER_TICK_S)


class Pulse:
    """One peer's heartbeat, ours and its own."""

    def __init__(self, tempo: Tempo = TEMPO, phase: float = 0.0) -> None:
        """``phase``: the part of the time between two heartbeats that is over at first. Whoever meets
        hundreds of peers at once speaks to some of them at a time."""
        self._tempo = tempo
        self._silence = 0.0
        self._since_sent = phase * tempo.heartbeat_s

    def heard(self) -> None:
        """The peer said something, whatever it was."""
        self._silence = 0.0

    def tick(self, elapsed: float) -> bool:
        """``elapsed`` seconds went by since the last tick. True: it is time to send a heartbeat."""
        self._silence += min(elapsed, MOST_PER_TICK_S)
        self._since_sent += elapsed
        if self._since_sent < self._tempo.heartbeat_s:
            return False
        self._since_sent = 0.0
        return True

    def lost(self, busy: Callable[[], bool]) -> bool:
        """Whether the peer has been silent for too long. ``busy``, whether anything is open there, is asked
        only of a peer that is silent."""
        if self._silence < self._tempo.busy_silence_s:
            return False
        return self._silence >= self._tempo.idle_silence_s or busy()
