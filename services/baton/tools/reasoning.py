"""Parsers of reasoning in a model's text, as it arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from baton.tools.markers import undecided

OPENING, CLOSING = "<think>", "</think>"


class ReasoningSplit(NamedTuple):
    """The reasoning and the content that a piece of text adds."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(Protocol):
    """A parser that splits one answer into reasoning and content. However the text is cut into pushes, the
    parts amount to the same."""

    def push(self, text: str) -> ReasoningSplit:
        """Take more text; return the parts that are certain now."""

    def finish(self) -> ReasoningSplit:
        """Return the last parts, at the end of the text."""


class ThinkParser:
    """Parses ``<think>…</think>`` at the beginning of an answer. White space next to the markers is part of
    them.

    ``opened``: the answer begins inside of the reasoning, as when the chat template wrote the opening marker.
    An answer that ends inside is reasoning to its end.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._opened = opened
        self._held = ""
        self._step = self._at_start

    def push(self, text: str) -> ReasoningSplit:
        self._held += text
        return self._step()

    def finish(self) -> ReasoningSplit:
        held, self._held = self._held, ""
        if self._step in (self._at_thought, self._after):  # white space only
            return ReasoningSplit()
        if self._step == self._thinking or (self._step == self._at_start and self._opened):
            return ReasoningSplit(reasoning=held)
        return ReasoningSplit(content=held)

    def _at_start(self) -> ReasoningSplit:
        rest = self._held.lstrip()
        if rest.startswith(OPENING):
            self._held = rest[len(OPENING) :]
        elif OPENING.startswith(rest):
            return ReasoningSplit()
        elif not self._opened:
            return self._go(self._in_content)
        return self._go(self._at_thought)

    def _at_thought(self) -> ReasoningSplit:
        self._held = self._held.lstrip()
        return self._go(self._thinking) if self._held else ReasoningSplit()

    def _thinking(self) -> ReasoningSplit:
        at = self._held.find(CLOSING)
        if at < 0:
            free = len(self._held) - undecided(self._held, CLOSING)
            reasoning, self._held = self._held[:free], self._held[free:]
            return ReasoningSplit(reasoning)
        reasoning, self._held = self._held[:at].rstrip(), self._held[at + len(CLOSING) :]
        return ReasoningSplit(reasoning, self._go(self._after).content)

    def _after(self) -> ReasoningSplit:
        self._held = self._held.lstrip()
        return self._go(self._in_content) if self._held else ReasoningSplit()

    def _in_content(self) -> ReasoningSplit:
        content, self._held = self._held, ""
        return ReasoningSplit(content=content)

    def _go(self, step: Callable[[], ReasoningSplit]) -> ReasoningSplit:
        self._step = step
        return step()
