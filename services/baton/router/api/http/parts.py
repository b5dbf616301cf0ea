"""The parts of a chat's answer in OpenAI's shapes: content, reasoning, calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from baton.text.choice import Delta
from baton.tools.answer import AnswerFormat
from baton.tools.events import (
    CallArguments,
    CallBroken,
    CallStarted,
    Content,
    Event,
    MessageBuilder,
    Reasoning,
)

Fields = dict[str, object]


class ChoiceParts:
    """One choice of a chat whose text is parsed."""

    def __init__(self, format_: AnswerFormat) -> None:
        self._parser = format_.parser()
        self._several = format_.several
        self._tells_reasoning = format_.reasoning is not None and format_.tells_reasoning
        self._told = MessageBuilder()
        self._ids: dict[int, str] = {}
        """Of the calls that are told, by their index."""

    def add(self, delta: Delta) -> list[Fields]:
        """Take the next delta. Returns what it adds to a streamed message, in pieces: the text, and each call
        by itself, since OpenAI's client follows one call at a time. None: nothing yet."""
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        events = [event for event in events if self._is_told(event)]
        self._told.add(events)
        return self._fields(events)

    def finish_reason(self, delta: Delta) -> str | None:
        """Why the choice ended with ``delta``, as clients of tools expect it."""
        if delta.finish_reason == "stop" and self._told.has_calls:
            return "tool_calls"
        return delta.finish_reason

    def message(self) -> Fields:
        """The whole message."""
        message = self._told.message()
        bare = not message.content and (message.calls or message.reasoning)
        fields: Fields = {
            "role": "assistant",
            "content": None if bare else message.content,
            "refusal": None,
        }
        if self._tells_reasoning:
            fields |= _reasoning(message.reasoning or None)
        if message.calls:
            fields["tool_calls"] = [
                {
                    "id": self._ids[call.index],
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.calls
            ]
        return fields

    def _is_told(self, event: Event) -> bool:
        """Not reasoning that is unwanted, nor the calls after the first where there may be only one."""
        match event:
            case Reasoning():
                return self._tells_reasoning
            case CallStarted(index):
                if not self._several and self._told.has_calls:
                    return False
                self._ids[index] = f"call_{uuid.uuid4().hex[:24]}"
                return True
            case CallArguments(index) | CallBroken(index):
                return index in self._ids
        return True

    def _fields(self, events: Iterable[Event]) -> list[Fields]:
        content, reasoning = "", ""
        calls: dict[int, Fields] = {}
        for event in events:
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStarted(index, name):
                    calls[index] = self._started(index, name)
                case CallArguments(index, text):
                    calls[index] = _more(calls.get(index), index, text)
                case CallBroken():
                    pass  # told is told; what follows is content
        texts: Fields = _reasoning(reasoning) if reasoning else {}
        if content:
            texts["content"] = content
        told: list[Fields] = [texts] if texts else []
        return told + [{"tool_calls": [call]} for call in calls.values()]

    def _started(self, index: int, name: str) -> Fields:
        function = {"name": name, "arguments": ""}
        return {"index": index, "id": self._ids[index], "type": "function", "function": function}


def _reasoning(text: str | None) -> Fields:
    """By DeepSeek's name, and by the newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _more(call: Fields | None, index: int, arguments: str) -> Fields:
    """``call``, or nothing told of it in this event yet, with more arguments."""
    if call is None:
        return {"index": index, "function": {"arguments": arguments}}
    function = call["function"]
    assert isinstance(function, dict)
    return {**call, "function": {**function, "arguments": function["arguments"] + arguments}}
