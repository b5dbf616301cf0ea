"""The durations of the event loop's turns, measured by the lateness of a timer."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

from baton.telemetry.turns import TurnMetrics

TICK_S = 0.01
"""The tick for ``CLOSE_S`` after a tick that was late by ``LONG_S``, in seconds: long turns seldom come
alone."""
CALM_TICK_S = 0.04
"""The tick while requests are under way and turns are short, in seconds. Each tick wakes the loop, which
takes 0.1 ms of processor time on a virtual machine: every 10 ms, that would be a hundredth of a core."""
LONG_S = 0.02
CLOSE_S = 5.0
IDLE_TICK_S = 0.1
"""The tick while no request is under way, in seconds: waking an idle loop is the greatest cost of a tick."""
LATE_S = 0.005
"""Most seconds by which a timer of an idle loop is late."""
SLOW_S = 0.1
"""The length of a turn, in seconds, that delays heartbeats, which take a few turns each."""


class ProcessorWait:
    """The time that one thread was ready to run while other threads had the processors."""

    def __init__(self) -> None:
        """Measures the thread that calls this."""
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux, or a kernel that does not count
            self._file = -1

    def seconds(self) -> float:
        """Return the seconds since the thread began; 0 if the system does not count them."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Turns:
    """The tick of one event loop. It belongs to the loop's thread; other threads may read public
    attributes."""

    def __init__(self, metrics: TurnMetrics, idle: Callable[[], bool] = lambda: False) -> None:
        """``idle``: whether no request is under way. It is called at each tick."""
        self.thread = 0
        """The id of the loop's thread, once started."""
        self.ticked_at = time.monotonic()
        self._slow_s = 0.0
        self._close_until = self.ticked_at + CLOSE_S
        self._metrics = metrics
        self._idle = idle
        self._due = self.ticked_at
        self._used_s: float | None = None
        """Processor time of the thread at the last tick, in seconds, if the loop was idle then."""
        self._timer: asyncio.TimerHandle | None = None
        self._processor: ProcessorWait | None = None
        self._waited_s = 0.0
        """The seconds of ``_processor`` at the last tick."""

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
        """Return the sum of lateness of all ticks that were late by ``SLOW_S`` or more, in seconds. A tick
        that is due counts."""
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
            # The turn began before the tick was due; its processor time tells how long before.
            late = max(late, time.thread_time() - self._used_s)
        self._metrics.observe(late, now, late - min(late, self._waited_in_turn()))
        self._arm(loop, now)

    def _waited_in_turn(self) -> float:
        """Return the least time that the thread has waited for a processor since the tick was due, in
        seconds: its wait since the last tick, less the time from that tick until this one was due."""
        if self._processor is None:
            return 0.0
        before, self._waited_s = self._waited_s, self._processor.seconds()
        return max(0.0, self._waited_s - before - (self._due - self.ticked_at))
