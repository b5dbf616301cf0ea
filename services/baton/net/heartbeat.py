"""Detection of silent peers: a heartbeat each way on every link and stream, and how long silence may last.

A process that is killed closes its sockets and is detected at once. A process that is stopped, or behind a
network that drops packets, is detected by its silence alone. The transport's keepalive is too slow for that,
and the kernel answers it even while the process is stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

HEARTBEAT_S = 0.5
BUSY_SILENCE_S = 2.0
"""The silence after which a busy peer is given up, in seconds. Until then its pages are pinned, or clients
wait."""
IDLE_SILENCE_S = 10.0
TICK_S = 0.1
"""The time between two checks of all peers, in seconds."""
MAX_PER_TICK_S = 0.3
"""Most seconds of silence that one tick of our own timer counts. When a tick comes late, this process was not
listening: stopped, starved, or suspended."""

NO_PROBES = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 20))
"""gRPC options of both ends of a router's stream to a worker. gRPC would otherwise ping to probe the
bandwidth whenever data comes, on each of hundreds of streams whose frames are small. The lookahead gives
large messages (a snapshot of blocks) a sufficient window."""


@dataclass(frozen=True, slots=True)
class Tempo:
    """The time between heartbeats, and how long peers may be silent, in seconds."""

    heartbeat_s: float = HEARTBEAT_S
    busy_silence_s: float = BUSY_SILENCE_S
    idle_silence_s: float = IDLE_SILENCE_S


TEMPO = Tempo()


async def ticks() -> AsyncIterator[tuple[float, float]]:
    """Yield every ``TICK_S``, without end, the time by ``time.monotonic`` and the seconds since the last
    tick."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        yield now, now - before
        before = now


class OwnTime:
    """A clock of the seconds in which this process ran, by the ticks of its own timer. Time in which it was
    stopped, starved or suspended does not count: a message that is due may have come and not been read
    yet."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._passed = 0.0

    def tick(self, now: float) -> float:
        """Advance the clock. Returns how many of the seconds since the last tick do not count."""
        elapsed = now - self._ticked_at
        counted = min(elapsed, MAX_PER_TICK_S)
        self._ticked_at = now
        self._passed += counted
        return elapsed - counted

    def at(self, now: float) -> float:
        return self._passed + min(now - self._ticked_at, MAX_PER_TICK_S)


class Pulse:
    """The heartbeats to and from one peer."""

    def __init__(self, tempo: Tempo = TEMPO, phase: float = 0.0) -> None:
        """``phase``: the fraction of the time between two heartbeats that has passed at first. A process that
        connects to hundreds of peers at once so spreads its heartbeats."""
        self._tempo = tempo
        self._silence = 0.0
        self._since_sent = phase * tempo.heartbeat_s

    def heard(self) -> None:
        """Note that a message came from the peer."""
        self._silence = 0.0

    def tick(self, elapsed: float) -> bool:
        """Count ``elapsed`` seconds since the last tick. Returns whether it is time to send a heartbeat."""
        self._silence += min(elapsed, MAX_PER_TICK_S)
        self._since_sent += elapsed
        if self._since_sent < self._tempo.heartbeat_s:
            return False
        self._since_sent = 0.0
        return True

    def lost(self, busy: Callable[[], bool]) -> bool:
        """Whether the peer has been silent for too long. ``busy``, whether the peer has open work, is called
        only when the peer is silent."""
        if self._silence < self._tempo.busy_silence_s:
            return False
        return self._silence >= self._tempo.idle_silence_s or busy()
