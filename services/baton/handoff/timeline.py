"""The times at which a handoff reached its stages, on one side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from baton.handoff.messages import Credit, Grant, Name, Ready, SendComplete


class Stage(Enum):
    """The stages of a handoff, in order; each side sees some of them."""

    ASKED = "asked"
    """Prefill asked for room, or decode received the request."""
    CREDITED = "credited"
    """Decode promised room: prefill may compute."""
    READY = "ready"
    """The first blocks are computed."""
    GRANTED = "granted"
    """Decode has bound pages and posted its receives."""
    COMPUTED = "computed"
    """Prefill's last chunk is computed and its first token sampled."""
    POSTED = "posted"
    """The last send is posted."""
    SENT = "sent"
    """The last send is over."""
    ARRIVED = "arrived"
    """The last receive is over."""
    COMPLETE = "complete"
    """Prefill sent SendComplete, or decode received it."""
    COMMITTED = "committed"
    """Decode owns the request."""
    STARTED = "started"
    """Decode's first step with the request begins."""
    STEPPED = "stepped"
    """Decode's first step with the request is over."""


STAGE_OF: Mapping[type[object], Stage] = MappingProxyType(
    {
        Credit: Stage.CREDITED,
        Ready: Stage.READY,
        Grant: Stage.GRANTED,
        SendComplete: Stage.COMPLETE,
    }
)
"""The stage that a side reaches when it sends or receives a message of this kind."""


class Timeline:
    """The time of each stage that a handoff has reached, in seconds on this process's monotonic clock."""

    def __init__(self, now: float, connector: str) -> None:
        self.connector = connector
        self.flush_us = 0
        """The time that prefill's last sends took on its own clock, in microseconds; known at decode only."""
        self.received_bytes = 0
        """The bytes of KV blocks that have arrived; known at decode only."""
        self._at = {Stage.ASKED: now}
        self.moved_at = now
        """The time of the last event that was no repetition; pauses of this process, which do not count, are
        added to it."""

    def reach(self, stage: Stage, now: float) -> None:
        """Note a stage. The first time counts; for stages that come in pieces (sends, receives), the last."""
        if stage in (Stage.POSTED, Stage.SENT, Stage.ARRIVED) or stage not in self._at:
            self._at[stage] = self.moved_at = now

    def reached(self, stage: Stage) -> float | None:
        return self._at.get(stage)

    def between(self, start: Stage, end: Stage) -> float | None:
        """Return the seconds between two stages, 0 if ``end`` came first; None unless both came."""
        if start not in self._at or end not in self._at:
            return None
        return max(0.0, self._at[end] - self._at[start])

    @property
    def last(self) -> Stage:
        """The stage that the handoff reached last."""
        return next(reversed(self._at))

    def line(self, name: Name) -> str:
        """Return the timeline as a line of JSON, for a log."""
        at = {stage.value: round(when, 6) for stage, when in self._at.items()}
        return json.dumps({"request_id": name.request_id, "attempt": name.attempt, "at": at})
