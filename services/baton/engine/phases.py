"""Where a request's time went on the worker that computes its prompt, from the submit to the first token."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import worker_pb2 as pb


@dataclass(slots=True)
class Clock:
    """When a request got on, in seconds on this process's monotonic clock. 0.0: it has not, or need not."""

    submitted: float
    asked: float = 0.0
    """There was a link to decode."""
    credited: float = 0.0
    """Decode had promised room."""
    started: float = 0.0
    """The first step with it was about to begin."""

    def phases(self, computed: float, now: float) -> pb.ComputePhases:
        """One after the other, from the submit until ``now``. ``computed``: the prompt's last step ended."""
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
    """Of an unsigned field: nothing ends before it began."""
    return max(0, round(seconds * 1e6))
