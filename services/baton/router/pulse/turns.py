"""How long the turns of the event loop are, by a timer that measures how late it comes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

from baton.telemetry.turns import TurnMetrics

TICK_S = 0.01
"""For ``CLOSE_S`` after a tick that was late by ``LONG_S``: long turns seldom come alone."""
CALM_TICK_S = 0.04
"""While requests are under way and turns are short. Each tick wakes the loop, which takes 0.1 ms of processor
time on a virtual machine: each 10 ms, that is a hundredth of a core."""
LONG_S = 0.02
CLOSE_S = 5.0
IDLE_TICK_S = 0.1
"""While no request is under way: an idle loop has to be woken for each tick, which is what costs most."""
LATE_S = 0.005
"""No timer of an idle loop is later than that."""
SLOW_S = 0.1
"""A turn so long holds up heartbeats, which take a few turns each."""


class ProcessorWait:
    """How long one thread has been ready to run while others had the processors."""

    def __init__(self) -> None:
        """For the thread that makes it."""
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux, or one that does not count
            self._file = -1

    def seconds(self) -> float:
        """Since the thread began; 0 where the system does not tell."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Turns:
    """The tick of one event loop. It belongs to the loop's thread; others may read what is public."""

    def __init__(self, metrics: TurnMetrics, idle: Callable[[], bool] = lambda: False) -> None:
        """``idle``: whether no request is under way. It is asked at each tick."""
        self.thread = 0
        """Of the loop, once it is started."""
        self.ticked_at = time.monotonic()
        self._slow_s = 0.0
        self._close_until = self.ticked_at + CLOSE_S
        self._metrics = metrics
        self._idle = idle
        self._due = self.ticked_at
        self._used_s: float | None = None
        """Processor time of the thread at the last tick, of a loop that was idle."""
        self._timer: asyncio.TimerHandle | None = None
        self._processor: ProcessorWait | None = None
        self._waited_s = 0.0
        """By ``_processor``, at the last tick."""

    def start(self) -> None:
        """Tick from now on, on the running loop."""
        self.thread = threading.get_ident()
        self._processor = ProcessorWait()
        self._waited_s = self._processor.seconds()
        self._arm(asyncio.get_running_loop(), time.monotonic())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._processor is not None:
            self._processor.close()

    def slow_at(self, now: float) -> float:
        """Seconds by which ticks came late so far, by ``SLOW_S`` and more; with one that is due."""
        overdue = now - self._due
        return self._slow_s + (overdue if overdue >= SLOW_S else 0.0)

    def _arm(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        idle = self._idle()
        busy_s = TICK_S if now < self._close_until else CALM_TICK_S
        after_s = IDLE_TICK_S if idle else busy_s
        self._used_s = time.thread_time() if idle else None
        self._due = now + after_s
        self.ticked_at = now
        self._timer = loop.call_later(after_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        late = max(now - self._due, 0.0)
        if late >= LONG_S:
            self._close_until = now + CLOSE_S
        if late >= SLOW_S:
            self._slow_s += late
        if self._used_s is not None and late >= LATE_S:
            # The turn began before the tick was due: how long before, its computing tells.
            late = max(late, time.thread_time() - self._used_s)
        self._metrics.took(late, now, late - min(late, self._waited_in_turn()))
        self._arm(loop, now)

    def _waited_in_turn(self) -> float:
        """How long the thread at least has waited for a processor since the tick was due: what it has waited
        since the last tick, less all the time until it was due."""
        if self._processor is None:
            return 0.0
        before, self._waited_s = self._waited_s, self._processor.seconds()
        return max(0.0, self._waited_s - before - (self._due - self.ticked_at))
