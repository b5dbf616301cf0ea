"""A whole answer's parser: reasoning first, then content and calls."""

from __future__ import annotations

from dataclasses import dataclass

from baton.tools.events import Content, Event, Reasoning
from baton.tools.formats import ReasoningFormat, ToolFormat
from baton.tools.parsers import ToolParser
from baton.tools.reasoning import ReasoningParser, Split


class AnswerParser:
    """Turns the text of one answer into events. Calls are not looked for in the reasoning."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        """Take more text; return what is certain now."""
        return self._events(Split(content=text) if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Event]:
        """The rest, when no more text comes."""
        events = [] if self._reasoning is None else self._events(self._reasoning.finish())
        return events if self._tools is None else events + self._tools.finish()

    def _events(self, split: Split) -> list[Event]:
        events: list[Event] = [Reasoning(split.reasoning)] if split.reasoning else []
        if split.content and self._tools is not None:
            events += self._tools.push(split.content)
        elif split.content:
            events.append(Content(split.content))
        return events


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one request are parsed."""

    reasoning: ReasoningFormat | None = None
    opened: bool = False
    """Answers begin inside of the reasoning."""
    closed: bool = False
    """The reasoning is over before they begin."""
    tells_reasoning: bool = True
    """False leaves the reasoning out."""
    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    """Functions that may be called."""
    several: bool = True
    """Whether an answer may hold more than one call; those after the first are left out otherwise."""
    marker_ids: frozenset[int] = frozenset()
    """Special tokens that the parsers look for: they must not be left out of the text."""

    def parser(self) -> AnswerParser:
        """One for an answer."""
        return AnswerParser(
            None if self.reasoning is None else self.reasoning.parser(opened=self.opened),
            None if self.tools is None else self.tools.parser(self.names),
        )
