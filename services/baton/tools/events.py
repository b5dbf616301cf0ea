"""What a parser finds in a text, in order; and what they amount to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Call:
    """One call of a function."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole answer. What a broken call was taken from is content here, where it stood."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    """By index, in order."""

    def add(self, events: Iterable[Event]) -> None:
        """What has been found next."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStarted(index, name):
                    self.calls[index] = Call(name)
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallBroken(index, text):
                    del self.calls[index]
                    self.content += text
