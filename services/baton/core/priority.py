"""The priority and deadline of a request. Shared by router and engine; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import inference_pb2 as pb

MAX_PRIORITY = 100
"""The highest level, which bounds how long a request can be overtaken. The lowest is its negative."""


@dataclass(frozen=True, slots=True)
class Priority:
    """The priority of a request. Times are seconds on this process's monotonic clock. Between processes they
    are sent as durations, since hosts' clocks differ: the time on the network is not counted."""

    level: int = 0
    """The level of priority. Lower goes first."""
    since: float = 0.0
    """The time the request came to its router."""
    deadline: float | None = None
    """The time the request ends, answered or not."""

    def overdue(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now

    def to_proto(self, now: float) -> pb.Priority:
        message = pb.Priority(level=self.level, waited_ms=_milliseconds(now - self.since))
        if self.deadline is not None:
            message.remaining_ms = _milliseconds(self.deadline - now)
        return message

    @classmethod
    def from_proto(cls, message: pb.Priority, now: float) -> Priority:
        deadline = now + message.remaining_ms / 1e3 if message.HasField("remaining_ms") else None
        return cls(message.level, now - message.waited_ms / 1e3, deadline)


NO_PRIORITY = Priority()
"""No priority and no deadline."""


def _milliseconds(seconds: float) -> int:
    """Return milliseconds for a uint64 field: 0 for a negative time."""
    return max(0, round(seconds * 1e3))
