"""How long the turns of the event loop are, by a timer that measures how late it comes."""

from __future__ import annotations

import asyncio
import threading
import time

from baton.telemetry.turns import TurnMetrics

TICK_S = 0.01
SLOW_S = 0.1
"""A turn so long holds up heartbeats, which take a few turns each."""


class Turns:
    """The tick of one event loop. It belongs to the loop's thread; others may read what is public."""

    def __init__(self, metrics: TurnMetrics) -> None:
        self.thread = 0
        """Of the loop, once it is started."""
        self.ticked_at = time.monotonic()
        self._slow_s = 0.0
        self._metrics = metrics
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick from now on, on the running loop."""
        self.thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._arm(self._loop, time.monotonic())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def slow_at(self, now: float) -> float:
        """Seconds by which ticks came late so far, by ``SLOW_S`` and more; with one that is due."""
        overdue = now - self.ticked_at - TICK_S
        return self._slow_s + (overdue if overdue >= SLOW_S else 0.0)

    def _arm(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        self.ticked_at = now
        self._due = now + TICK_S
        self._timer = loop.call_later(TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        late = max(now - self._due, 0.0)
        if late >= SLOW_S:
            self._slow_s += late
        self._metrics.took(late, now)
        self._arm(loop, now)
