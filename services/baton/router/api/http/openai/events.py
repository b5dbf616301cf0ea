"""The parsed text of a chat's answer as events, before they have the shape of any protocol."""

from __future__ import annotations

import uuid

from baton.text.choice import Delta
from baton.tools.answer import AnswerFormat
from baton.tools.events import CallArguments, CallBroken, CallStarted, Event, Reasoning


class ChoiceEvents:
    """Turns the deltas of one choice into events."""

    def __init__(self, format_: AnswerFormat) -> None:
        self.tells_reasoning = format_.reasoning is not None and format_.tells_reasoning
        self._parser = format_.parser()
        self._several = format_.several
        self._ids: dict[int, str] = {}
        """The ids of the calls that are told, by index."""
        self._calls: set[int] = set()
        """The indices of told calls that are not broken."""

    def add(self, delta: Delta) -> list[Event]:
        """Take the next delta, and return the events to tell."""
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        return [event for event in events if self._is_told(event)]

    def finish_reason(self, delta: Delta) -> str | None:
        """Return why the choice ended with ``delta``: ``tool_calls`` if it stopped after calls."""
        if delta.finish_reason == "stop" and self._calls:
            return "tool_calls"
        return delta.finish_reason

    def call_id(self, index: int) -> str:
        """Return the id of a call that is told."""
        return self._ids[index]

    def _is_told(self, event: Event) -> bool:
        """Whether to tell ``event``: neither reasoning that is not wanted, nor calls after the first if only
        one is allowed."""
        match event:
            case Reasoning():
                return self.tells_reasoning
            case CallStarted(index):
                if not self._several and self._calls:
                    return False
                self._ids[index] = f"call_{uuid.uuid4().hex[:24]}"
                self._calls.add(index)
                return True
            case CallArguments(index):
                return index in self._ids
            case CallBroken(index):
                self._calls.discard(index)
                return index in self._ids
        return True
