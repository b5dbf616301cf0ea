"""A thread that detects when the event loop does not run, and sends beats in its place.

Workers give up a silent router, stopped or disconnected, and all its requests with it. A router whose loop is
busy with one long turn is as silent, but lives. So this thread sends beats in the loop's place, for as long
as a turn may take. It stops with the process: a stopped process sends no beats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from baton.net.heartbeat import HEARTBEAT_S, MAX_PER_TICK_S
from baton.process import stacks
from baton.router.pulse.beats import Beats
from baton.router.pulse.turns import Turns

log = logging.getLogger(__name__)

LOOK_S = 0.1
BEHIND_S = 0.3
"""The total lateness in the last ``WINDOW_S``, in seconds, with which a loop is behind with its
heartbeats."""
WINDOW_S = 1.0
MAX_S = 30.0
"""The length of a turn that has hung, in seconds. Beats stop, and workers give the router up. Its parent
process, or a liveness probe, then ends it."""
TELL_S = 1.0
TELL_EVERY_S = 60.0
"""The least time between two logs of the stack of a stalled loop, in seconds."""
LOG_THREAD = "loop watch log"
KEEP_S = 30.0
"""The time that connections are kept once the loop runs again, in seconds: a slow loop is soon slow again."""


class LoopWatch:
    """Watches one loop's turns, from a thread of its own."""

    def __init__(self, turns: Turns, beats: Sequence[Beats], max_s: float = MAX_S) -> None:
        """``max_s``: the length of a turn after which no beats are sent, in seconds."""
        self._turns = turns
        self._beats = beats
        self._max_s = max_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)
        self._standing_s = 0.0
        """The time since the loop's last tick, in seconds in which this thread ran."""
        self._ticked_at = turns.ticked_at
        self._late: deque[float] = deque(
            [turns.slow_at(time.monotonic())], maxlen=round(WINDOW_S / LOOK_S) + 1
        )
        """The total lateness of the loop, in seconds, at each of the last looks."""
        self._sent_at = float("-inf")
        self._told_at = float("-inf")
        self._given_up = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the beats. Returns at once; the thread closes the connections."""
        self._stop.set()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(LOOK_S):
            now = time.monotonic()
            try:
                self.look(now, now - before)
            except Exception:  # the next look may succeed, and no other thread sends beats
                log.exception("the event loop could not be looked after")
            before = now
        for beats in self._beats:
            beats.rest()

    def look(self, now: float, elapsed: float) -> None:
        """Check the loop, ``elapsed`` seconds after the last look."""
        ticked_at = self._turns.ticked_at
        if ticked_at == self._ticked_at:
            self._standing_s += min(elapsed, MAX_PER_TICK_S)
        else:
            self._ticked_at, self._standing_s, self._given_up = ticked_at, 0.0, False
        self._late.append(self._turns.slow_at(now))
        if self._standing_s >= TELL_S and now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            where = stacks.of_thread(self._turns.thread)
            self._say(logging.WARNING, "the event loop has stood for %.1f s, at\n%s", self._standing_s, where)
        if self._standing_s > self._max_s:
            self._give_up()
        elif self._late[-1] - self._late[0] >= BEHIND_S:
            if now - self._sent_at >= HEARTBEAT_S:
                self._sent_at = now
                for beats in self._beats:
                    beats.send()
        elif now - self._sent_at >= KEEP_S:
            for beats in self._beats:
                beats.rest()

    def _give_up(self) -> None:
        if not self._given_up:
            self._given_up = True
            self._say(
                logging.ERROR,
                "the event loop has stood for %.0f s: workers are not told any more that the router lives",
                self._standing_s,
            )

    @staticmethod
    def _say(level: int, text: str, *about: object) -> None:
        """Log in another thread: the loop may hang in a write to the log, and hold its lock."""
        threading.Thread(target=log.log, args=(level, text, *about), name=LOG_THREAD, daemon=True).start()
