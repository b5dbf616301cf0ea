"""The time that other guests of the host had this machine's cores."""

from __future__ import annotations

import bisect
import threading
import time
from types import TracebackType

from loadtest.routers import fleet

LOOK_S = 0.02
AFTERWARDS_NS = 100 * 10**6
"""The time for which tokens that had to wait may still be late."""


class Stolen:
    """A context manager that looks again and again whether the kernel has counted more stolen time (it counts
    in units of 10 ms)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The stolen time of all cores so far."""
        self._times: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stolen")

    def __enter__(self) -> Stolen:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        with fleet.on_core(fleet.OTHERS_CORE):  # only this thread moves
            before = fleet.stolen_seconds()
            while not self._stop.wait(LOOK_S):
                counted = fleet.stolen_seconds()
                if counted > before:
                    self._times.append(time.monotonic_ns())
                    self.seconds += counted - before
                before = counted

    def disturbed(self, begun: int, ended: int) -> bool:
        """Return whether time was stolen between two moments, in nanoseconds on the monotonic clock, or so
        shortly before that it could be felt."""
        at = bisect.bisect_left(self._times, begun - AFTERWARDS_NS)
        return at < len(self._times) and self._times[at] <= ended + int(LOOK_S * 1e9)
