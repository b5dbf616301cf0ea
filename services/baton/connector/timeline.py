"""When a handoff reached each of its stages, on one side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from baton.connector.messages import Credit, Grant, Name, Ready, SendComplete


class Stage(Enum):
    """In the order in which they come; a side knows some of them."""

    ASKED = "asked"
    """Prefill asked for room; decode heard of it."""
    CREDITED = "credited"
    """Room is promised: prefill may compute."""
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
    """Prefill said SendComplete; decode heard it."""
    COMMITTED = "committed"
    """The request is decode's."""
    STARTED = "started"
    """Decode's first step with it begins."""
    STEPPED = "stepped"
    """That step is over."""


STAGE_OF: Mapping[type[object], Stage] = MappingProxyType(
    {
        Credit: Stage.CREDITED,
        Ready: Stage.READY,
        Grant: Stage.GRANTED,
        SendComplete: Stage.COMPLETE,
    }
)
"""The stage that a side reaches when it says or hears a message of this kind."""


class Timeline:
    """Seconds on this process's monotonic clock, by stage."""

    def __init__(self, now: float, connector: str) -> None:
        self.connector = connector
        self.flush_us = 0
        """At decode: what prefill told of its last sends, on its own clock."""
        self._at = {Stage.ASKED: now}
        self.moved_at = now
        """When anything happened last that was not said before, or later: what this process missed does not
        count."""

    def reach(self, stage: Stage, now: float) -> None:
        """The last time counts for what comes piecemeal (sends, receives), the first for what is repeated."""
        if stage in (Stage.POSTED, Stage.SENT, Stage.ARRIVED) or stage not in self._at:
            self._at[stage] = self.moved_at = now

    def reached(self, stage: Stage) -> float | None:
        return self._at.get(stage)

    def between(self, start: Stage, end: Stage) -> float | None:
        """Seconds from one stage to another, 0 if they came the other way round; None unless both came."""
        if start not in self._at or end not in self._at:
            return None
        return max(0.0, self._at[end] - self._at[start])

    @property
    def last(self) -> Stage:
        """The stage that it is in."""
        return next(reversed(self._at))

    def line(self, name: Name) -> str:
        """All of it as JSON, for a log."""
        at = {stage.value: round(when, 6) for stage, when in self._at.items()}
        return json.dumps({"request_id": name.request_id, "attempt": name.attempt, "at": at})
