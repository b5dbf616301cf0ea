"""The tokens of a model as llguidance needs them: every grammar is compiled against them."""

from __future__ import annotations

import msgspec
from llguidance import LLMatcher, LLTokenizer

from baton.grammar.errors import GrammarError
from baton.grammar.limits import parser_limits
from baton.text.tokenizer import Tokenizer

_LINE_CHARS = 300
_NOTHING_FITS = "NoExtensionBias"
"""llguidance's name for the error that neither a token nor an end is possible."""


class TokenTable(msgspec.Struct, frozen=True):
    """The data that the token table is made from; small enough to be sent to another process."""

    tokenizer_json: str
    vocab_size: int
    """The size of the model's logits; the tokenizer may name fewer tokens."""
    eos_token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> TokenTable:
        """Make a table. Raises GrammarError if this tokenizer's tokens have no bytes of their own."""
        if not tokenizer.tokens_are_bytes:
            raise GrammarError("this model's tokenizer is of a kind that cannot be guided")
        size = max(vocab_size, tokenizer.vocab_size)
        # Some configurations name ids beyond the vocabulary.
        return cls(tokenizer.to_json(), size, [token for token in eos_token_ids if token < size])

    def build(self) -> LLTokenizer:
        """Build llguidance's tokenizer. Raises ValueError if llguidance does not know the kind of
        tokenizer."""
        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the start of ``grammar`` (llguidance's notation). Raises GrammarError if the
    grammar is invalid.

    May take for ever, or overflow the stack, for a grammar that has passed no trial.
    """
    matcher = LLMatcher(tokens, grammar, limits=parser_limits(), log_level=0)
    raise_error(matcher)
    return matcher


def raise_error(matcher: LLMatcher) -> None:
    """Raise GrammarError, in one line, if the matcher is in an error state, which it never leaves."""
    if matcher.is_error():
        message = matcher.get_error()
        raise GrammarError("no text can match it" if _NOTHING_FITS in message else in_one_line(message))


def in_one_line(message: str) -> str:
    """Return the first line of ``message``, which is llguidance's, and the lines that begin with "error:",
    which are those of a library below it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    line = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher, tokens: LLTokenizer) -> None:
        self._start = start
        self.vocab_size = tokens.vocab_size

    def matcher(self) -> LLMatcher:
        """Return a matcher at the grammar's start, independent of all others."""
        return self._start.deep_copy()
