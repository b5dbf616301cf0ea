"""A thread that notices when the event loop does not run, and speaks for it meanwhile.

Workers give up a router that is silent, and all its requests with it: one that is stopped, or cut off. A loop
that is busy with one long turn is as silent, and is neither. So this thread beats in its place, for as long
as a turn may take. It lives and stops with the process: nobody hears it of one that is stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from baton import stacks
from baton.connector.liveness import HEARTBEAT_S, MOST_PER_TICK_S
from baton.router.pulse.beats import Beats
from baton.router.pulse.turns import Turns

log = logging.getLogger(__name__)

LOOK_S = 0.1
BEHIND_S = 0.3
"""A loop that was late by so much in all, of the last ``WINDOW_S``, is behind with its heartbeats."""
WINDOW_S = 1.0
LONGEST_S = 30.0
"""A turn of this length has hung: workers give the router up, as they would any that is silent. Its parent
process, or a liveness probe, ends it then."""
TELL_S = 1.0
TELL_EVERY_S = 60.0
"""Between two accounts of where a loop stands."""
KEEP_S = 30.0
"""For connections, once the loop speaks for itself: what was slow is soon slow again."""


class LoopWatch:
    """Watches one loop's turns, from a thread of its own."""

    def __init__(self, turns: Turns, beats: Sequence[Beats], longest_s: float = LONGEST_S) -> None:
        """``longest_s``: how long a turn may be, until nobody beats for it."""
        self._turns = turns
        self._beats = beats
        self._longest_s = longest_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)
        self._standing_s = 0.0
        """How long the loop has not ticked, in seconds in which this thread ran."""
        self._ticked_at = turns.ticked_at
        self._late: deque[float] = deque(
            [turns.slow_at(time.monotonic())], maxlen=round(WINDOW_S / LOOK_S) + 1
        )
        """Seconds by which the loop was late so far, at the last looks."""
        self._sent_at = float("-inf")
        self._told_at = float("-inf")
        self._given_up = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Beat no more. Returns at once; connections are closed by the thread."""
        self._stop.set()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(LOOK_S):
            now = time.monotonic()
            try:
                self.look(now, now - before)
            except Exception:  # the next look may go well, and nobody else beats
                log.exception("the event loop could not be looked after")
            before = now
        for beats in self._beats:
            beats.rest()

    def look(self, now: float, elapsed: float) -> None:
        """``elapsed`` seconds went by since the last look."""
        ticked_at = self._turns.ticked_at
        if ticked_at == self._ticked_at:
            self._standing_s += min(elapsed, MOST_PER_TICK_S)
        else:
            self._ticked_at, self._standing_s, self._given_up = ticked_at, 0.0, False
        self._late.append(self._turns.slow_at(now))
        if self._standing_s >= TELL_S and now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            where = stacks.of_thread(self._turns.thread)
            self._say(logging.WARNING, "the event loop has stood for %.1f s, at\n%s", self._standing_s, where)
        if self._standing_s > self._longest_s:
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
        """Not in this thread: the loop may stand in writing to a log that takes nothing, with its lock."""
        threading.Thread(target=log.log, args=(level, text, *about), daemon=True).start()
