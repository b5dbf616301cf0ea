"""The events that a parser finds in a text, in order, and the message that they make up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a function that was offered; its arguments follow."""

    index: int
    """The call's number among the calls of an answer, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: all fragments together are a JSON object as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The started call is none: its JSON is malformed, or the text ended inside of it."""

    index: int
    text: str
    """All text taken for the call, markers included. Later text comes as content."""


Event: TypeAlias = Content | Reasoning | CallStarted | CallArguments | CallBroken


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function."""

    index: int
    """The call's number as in the events: numbers of broken calls are left out."""
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer. The text of a broken call is content here, where it stood."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


class MessageBuilder:
    """Builds a message from events."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Add the next events."""
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStarted(index, name):
                    self._names[index] = name
                    self._arguments[index] = []
                case CallArguments(index, text):
                    self._arguments[index].append(text)
                case CallBroken(index, text):
                    del self._names[index], self._arguments[index]
                    self._content.append(text)

    def message(self) -> ParsedAnswer:
        """Return the message of all events added."""
        calls = (Call(index, name, "".join(self._arguments[index])) for index, name in self._names.items())
        return ParsedAnswer("".join(self._content), "".join(self._reasoning), tuple(calls))
