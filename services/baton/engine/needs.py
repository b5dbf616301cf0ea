"""What a sequence must wait for before a step may choose its tokens."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

from baton.engine.sampling.bad_words import BadWords
from baton.grammar.errors import GrammarError
from baton.grammar.table import Grammar


class SequenceNeeds(NamedTuple):
    """What is made of a sequence's parameters beside the steps."""

    grammar: Future[Grammar] | None
    bad_words: Future[BadWords] | None

    @property
    def pending(self) -> list[Future[Grammar] | Future[BadWords]]:
        return [each for each in self if each is not None and not each.done()]

    @property
    def compiled(self) -> Grammar | None:
        """The compiled grammar, if one is needed; all is done. Raises GrammarError, a new one each time, if
        the grammar was refused, and what an automaton failed with."""
        if self.bad_words is not None:
            self.bad_words.result()
        return None if self.grammar is None else compiled(self.grammar)


def compiled(grammar: Future[Grammar]) -> Grammar:
    """Return the grammar of a finished compilation. Raises GrammarError, a new one each time, if the grammar
    was refused."""
    refusal = grammar.exception()
    if isinstance(refusal, GrammarError):
        raise type(refusal)(f"structured output: {refusal}")
    return grammar.result()
