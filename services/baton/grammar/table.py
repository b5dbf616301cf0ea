"""The tokens of a model as llguidance needs them: every grammar is compiled against them."""

from __future__ import annotations

import msgspec
from llguidance import LLMatcher, LLTokenizer

from baton.grammar.errors import GrammarError
from baton.grammar.limits import parser_limits
from baton.text.tokenizer import Tokenizer

_LINE_CHARS = 300
_NOTHING_FITS = "NoExtensionBias"
"""What llguidance calls it when neither a token nor an end is possible."""


class TokenTable(msgspec.Struct, frozen=True):
    """What the table is made from; small enough to be sent to another process."""

    tokenizer_json: str
    vocab_size: int
    """Of the model's logits; the tokenizer may name fewer tokens."""
    eos_token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> TokenTable:
        """GrammarError if this tokenizer's tokens have no bytes of their own."""
        if not tokenizer.tokens_are_bytes:
            raise GrammarError("this model's tokenizer is of a kind that cannot be guided")
        size = max(vocab_size, tokenizer.vocab_size)
        # Some configurations name ids beyond the vocabulary.
        return cls(tokenizer.to_json(), size, [token for token in eos_token_ids if token < size])

    def build(self) -> LLTokenizer:
        """ValueError if llguidance does not know the kind of tokenizer."""
        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of ``grammar`` (llguidance's notation). GrammarError if that is invalid.

    May take for ever, or overflow the stack, for what no trial has passed.
    """
    matcher = LLMatcher(tokens, grammar, limits=parser_limits(), log_level=0)
    raise_error(matcher)
    return matcher


def raise_error(matcher: LLMatcher) -> None:
    """Raises GrammarError, in one line, if the matcher is in an error state: it never leaves it."""
    if matcher.is_error():
        message = matcher.get_error()
        raise GrammarError("no text can match it" if _NOTHING_FITS in message else in_one_line(message))


def in_one_line(message: str) -> str:
    """llguidance's first line tells what is wrong, and that of a library below it begins with "error"."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    line = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"
