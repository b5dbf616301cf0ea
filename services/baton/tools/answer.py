"""The parser of a whole answer: reasoning first, then content and calls."""

from __future__ import annotations

from dataclasses import dataclass

from baton.tools.events import Content, Event, Reasoning
from baton.tools.formats import ReasoningFormat, ToolFormat
from baton.tools.parsers import ToolParser
from baton.tools.reasoning import ReasoningParser, ReasoningSplit


class AnswerParser:
    """Turns the text of one answer into events. Calls are not looked for in the reasoning."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that are certain now."""
        return self._events(
            ReasoningSplit(content=text) if self._reasoning is None else self._reasoning.push(text)
        )

    def finish(self) -> list[Event]:
        """Return the last events, at the end of the text."""
        events = [] if self._reasoning is None else self._events(self._reasoning.finish())
        return events if self._tools is None else events + self._tools.finish()

    def _events(self, split: ReasoningSplit) -> list[Event]:
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
    """Whether answers begin inside of the reasoning."""
    closed: bool = False
    """Whether the reasoning is over before answers begin."""
    tells_reasoning: bool = True
    """Whether reasoning is reported; otherwise it is left out."""
    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    """The functions that may be called."""
    several: bool = True
    """Whether an answer may hold more than one call; otherwise calls after the first are left out."""
    guided: bool = False
    """Whether answers follow a grammar, which has no reasoning where that is over before they begin."""
    marker_ids: frozenset[int] = frozenset()
    """Special tokens that the parsers look for, which must not be left out of the text."""

    def parser(self) -> AnswerParser:
        """Make the parser of one answer."""
        reasoning = None if self.closed and self.guided else self.reasoning
        return AnswerParser(
            None if reasoning is None else reasoning.parser(opened=self.opened),
            None if self.tools is None else self.tools.parser(self.names),
        )
