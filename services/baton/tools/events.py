"""What a parser finds in a text, in order; and what they amount to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a function that was offered; its arguments follow."""

    index: int
    """0, 1, … in the order of the calls in an answer."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: all fragments together are a JSON object as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The started call turned out to be none: its JSON is wrong, or the text ended inside of it."""

    index: int
    text: str
    """All that was taken for the call, markers included. What follows it comes as content."""


Event: TypeAlias = Content | Reasoning | CallStarted | CallArguments | CallBroken


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function."""

    index: int
    """As in the events: those of broken calls are left out."""
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A whole answer. What a broken call was taken from is content here, where it stood."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


class MessageBuilder:
    """Adds events up to a message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, events: Iterable[Event]) -> None:
        """What has been found next."""
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

    def message(self) -> Message:
        """All that has been found."""
        calls = (Call(index, name, "".join(self._arguments[index])) for index, name in self._names.items())
        return Message("".join(self._content), "".join(self._reasoning), tuple(calls))
