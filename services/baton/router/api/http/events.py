"""What is told of a chat's answer whose text is parsed, before it has the shape of any protocol."""

from __future__ import annotations

import uuid

from baton.text.choice import Delta
from baton.tools.answer import AnswerFormat
from baton.tools.events import CallArguments, CallBroken, CallStarted, Event, Reasoning


class ChoiceEvents:
    """One choice: its deltas become events."""

    def __init__(self, format_: AnswerFormat) -> None:
        self.tells_reasoning = format_.reasoning is not None and format_.tells_reasoning
        self._parser = format_.parser()
        self._several = format_.several
        self._ids: dict[int, str] = {}
        """Of the calls that are told, by their index."""
        self._calls: set[int] = set()
        """Those that are not broken."""

    def add(self, delta: Delta) -> list[Event]:
        """Take the next delta. Returns what is to be told of it."""
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        return [event for event in events if self._is_told(event)]

    def finish_reason(self, delta: Delta) -> str | None:
        """Why the choice ended with ``delta``: ``tool_calls`` where it stopped to have them made."""
        if delta.finish_reason == "stop" and self._calls:
            return "tool_calls"
        return delta.finish_reason

    def call_id(self, index: int) -> str:
        """The id of a call that is told."""
        return self._ids[index]

    def _is_told(self, event: Event) -> bool:
        """Not reasoning that is unwanted, nor the calls after the first where there may be only one."""
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
