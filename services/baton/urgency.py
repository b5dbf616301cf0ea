"""When a request is due its turn, and when it is over. Shared by router and engine; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import inference_pb2 as pb

MOST_PRIORITY = 100
"""Bounds how long a request can be overtaken; the least is its negative."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """Times are seconds on this process's monotonic clock. Between processes they travel as durations, since
    no two hosts need have the same clock: the way there counts for nobody."""

    priority: int = 0
    """Lower goes first."""
    since: float = 0.0
    """When the request came to its router."""
    deadline: float | None = None
    """When it ends, answered or not."""

    def overdue(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now

    def to_proto(self, now: float) -> pb.Urgency:
        message = pb.Urgency(priority=self.priority, waited_ms=_milliseconds(now - self.since))
        if self.deadline is not None:
            message.remaining_ms = _milliseconds(self.deadline - now)
        return message

    @classmethod
    def from_proto(cls, message: pb.Urgency, now: float) -> Urgency:
        deadline = now + message.remaining_ms / 1e3 if message.HasField("remaining_ms") else None
        return cls(message.priority, now - message.waited_ms / 1e3, deadline)


CALM = Urgency()
"""No priority and no deadline."""


def _milliseconds(seconds: float) -> int:
    """Of a uint64 field: nothing is before now."""
    return max(0, round(seconds * 1e3))
