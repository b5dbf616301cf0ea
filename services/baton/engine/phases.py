"""The phases of a request on the worker that computes its prompt, from the submit to the first token."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import worker_pb2 as pb


@dataclass(slots=True)
class Clock:
    """The times at which a request advanced, in seconds on this process's monotonic clock. 0.0: the request
    has not reached that point, or skips it."""

    submitted: float
    asked: float = 0.0
    """The time at which there was a link to decode."""
    credited: float = 0.0
    """The time at which decode had promised room."""
    started: float = 0.0
    """The time just before the first step with the request."""

    def phases(self, computed: float, now: float) -> pb.ComputePhases:
        """The consecutive phases from the submit until ``now``. ``computed``: the time the prompt's last step
        ended."""
        asked = self.asked or self.submitted
        credited = self.credited or asked
        started = self.started or computed
        return pb.ComputePhases(
            link_us=microseconds(asked - self.submitted),
            room_us=microseconds(credited - asked),
            queue_us=microseconds(started - credited),
            compute_us=microseconds(computed - started),
            publish_us=microseconds(now - computed),
        )


def microseconds(seconds: float) -> int:
    """Converts seconds to whole microseconds for an unsigned field, at least 0."""
    return max(0, round(seconds * 1e6))
