"""The parts of a chat's answer in OpenAI's shapes: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from baton.router.api.http.openai.events import ChoiceEvents
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
    """The message of one choice of a chat whose text is parsed."""

    def __init__(self, format_: AnswerFormat) -> None:
        self._choice = ChoiceEvents(format_)
        self._told = MessageBuilder()

    def add(self, delta: Delta) -> list[Fields]:
        """Take the next delta. Returns what it adds to a streamed message, in pieces: the text, and each call
        by itself, since OpenAI's client follows one call at a time. Empty if there is nothing to tell yet."""
        events = self._choice.add(delta)
        self._told.add(events)
        return self._fields(events)

    def finish_reason(self, delta: Delta) -> str | None:
        """Return why the choice ended with ``delta``, as clients of tools expect it."""
        return self._choice.finish_reason(delta)

    def message(self) -> Fields:
        """Return the whole message."""
        message = self._told.message()
        bare = not message.content and (message.calls or message.reasoning)
        fields: Fields = {
            "role": "assistant",
            "content": None if bare else message.content,
            "refusal": None,
        }
        if self._choice.tells_reasoning:
            fields |= _reasoning(message.reasoning or None)
        if message.calls:
            fields["tool_calls"] = [
                {
                    "id": self._choice.call_id(call.index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.calls
            ]
        return fields

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
                    pass  # what has been told stays; what follows is content
        texts: Fields = _reasoning(reasoning) if reasoning else {}
        if content:
            texts["content"] = content
        told: list[Fields] = [texts] if texts else []
        return told + [{"tool_calls": [call]} for call in calls.values()]

    def _started(self, index: int, name: str) -> Fields:
        function = {"name": name, "arguments": ""}
        return {"index": index, "id": self._choice.call_id(index), "type": "function", "function": function}


def _reasoning(text: str | None) -> Fields:
    """Return the reasoning by DeepSeek's name for it, and by the newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _more(call: Fields | None, index: int, arguments: str) -> Fields:
    """Return ``call`` with more arguments; None is a call that this event has not told yet."""
    if call is None:
        return {"index": index, "function": {"arguments": arguments}}
    function = call["function"]
    assert isinstance(function, dict)
    return {**call, "function": {**function, "arguments": function["arguments"] + arguments}}
