"""How often the API server is asked, and how long it may take to answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """In seconds. What is deleted without an event, or behind a connection that has died silently, is noticed
    after ``watch_s + grace_s`` and one list; two lists may fail on top of that before it is 5 s.

    Tests run faster by a factor; ``watch_s`` then is what the client holds to, whatever it has asked for.
    """

    watch_s: float = 2.0
    """How long a watch lasts, at the end of which the server closes it and the next list is due."""
    grace_s: float = 0.25
    """How much later the client gives it up by itself."""
    list_s: float = 0.75
    """How long a list may take, and the head of a watch's answer."""
    first_pause_s: float = 0.05
    longest_pause_s: float = 0.8
    """Between attempts that fail; drawn at random between half of it and all."""

    def faster(self, factor: float) -> Pace:
        return Pace(
            watch_s=self.watch_s / factor,
            grace_s=self.grace_s / factor,
            list_s=self.list_s / factor,
            first_pause_s=self.first_pause_s / factor,
            longest_pause_s=self.longest_pause_s / factor,
        )
