"""Reasoning in a model's text, as it arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from baton.tools.markers import undecided

OPENING, CLOSING = "<think>", "</think>"


class Split(NamedTuple):
    """What a piece of text adds to both."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(Protocol):
    """Splits one answer. However the text is cut into pushes, the parts amount to the same."""

    def push(self, text: str) -> Split:
        """Take more text; return what is certain now."""

    def finish(self) -> Split:
        """The rest, when no more text comes."""


class ThinkParser:
    """``<think>…</think>`` at the beginning of an answer. White space next to the markers is a part of them.

    ``opened``: the answer begins inside, as when the chat template wrote the opening marker. An answer that
    ends inside is reasoning to its end.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._opened = opened
        self._held = ""
        self._step = self._at_start

    def push(self, text: str) -> Split:
        self._held += text
        return self._step()

    def finish(self) -> Split:
        held, self._held = self._held, ""
        if self._step in (self._at_thought, self._after):  # nothing but white space
            return Split()
        if self._step == self._thinking or (self._step == self._at_start and self._opened):
            return Split(reasoning=held)
        return Split(content=held)

    def _at_start(self) -> Split:
        rest = self._held.lstrip()
        if rest.startswith(OPENING):
            self._held = rest[len(OPENING) :]
        elif OPENING.startswith(rest):
            return Split()
        elif not self._opened:
            return self._go(self._in_content)
        return self._go(self._at_thought)

    def _at_thought(self) -> Split:
        self._held = self._held.lstrip()
        return self._go(self._thinking) if self._held else Split()

    def _thinking(self) -> Split:
        at = self._held.find(CLOSING)
        if at < 0:
            free = len(self._held) - undecided(self._held, CLOSING)
            reasoning, self._held = self._held[:free], self._held[free:]
            return Split(reasoning)
        reasoning, self._held = self._held[:at].rstrip(), self._held[at + len(CLOSING) :]
        return Split(reasoning, self._go(self._after).content)

    def _after(self) -> Split:
        self._held = self._held.lstrip()
        return self._go(self._in_content) if self._held else Split()

    def _in_content(self) -> Split:
        content, self._held = self._held, ""
        return Split(content=content)

    def _go(self, step: Callable[[], Split]) -> Split:
        self._step = step
        return step()
