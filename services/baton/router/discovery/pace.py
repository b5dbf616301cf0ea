"""The intervals and timeouts of lists and watches of the API server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTimings:
    """The timings of lists and watches, in seconds. A deletion without an event, or behind a connection that
    has died silently, is noticed after ``watch_s + grace_s`` and one list, and within 5 s even if two lists
    fail.

    Tests run faster by a factor; the client then ends a watch after ``watch_s`` itself, whatever it has asked
    of the server.
    """

    watch_s: float = 2.0
    """The length of a watch. At its end the server closes it, and the next list is due."""
    grace_s: float = 0.25
    """The time after the end of a watch at which the client gives it up itself."""
    list_s: float = 0.75
    """The timeout of a list, and of the head of a watch's answer."""
    first_pause_s: float = 0.05
    max_pause_s: float = 0.8
    """The longest pause between failed attempts. Each pause is drawn between half of its length and all."""

    def faster(self, factor: float) -> WatchTimings:
        return WatchTimings(
            watch_s=self.watch_s / factor,
            grace_s=self.grace_s / factor,
            list_s=self.list_s / factor,
            first_pause_s=self.first_pause_s / factor,
            max_pause_s=self.max_pause_s / factor,
        )
