"""The tokens of a model as llguidance needs them: every grammar is compiled against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from llguidance import LLMatcher, LLTokenizer

from baton.grammar.errors import GrammarError
from baton.grammar.limits import parser_limits
from baton.grammar.vocabulary import GuidedVocabulary
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
    text_token_ids: list[int] = []
    """Tokens that llguidance knows by name and that stand for their text as well, ascending."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> TokenTable:
        """Make a table. Raises GrammarError if this tokenizer's tokens have no bytes of their own."""
        if not tokenizer.tokens_are_bytes:
            raise GrammarError("this model's tokenizer is of a kind that cannot be guided")
        size = max(vocab_size, tokenizer.vocab_size)
        # Some configurations name ids beyond the vocabulary.
        ends = [token for token in eos_token_ids if token < size]
        return cls(tokenizer.to_json(), size, ends, sorted(tokenizer.bracketed_ids.difference(ends)))

    def build(self) -> GuidedVocabulary:
        """Build the vocabulary. Raises ValueError if llguidance does not know the kind of tokenizer."""
        return GuidedVocabulary(self.tokenizer_json, self.vocab_size, self.eos_token_ids, self.text_token_ids)


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


class GrammarMatcher:
    """Follows one output through a grammar, in the model's token ids.

    A token that has a text id too is taken by name where the grammar names it, else as its text.
    """

    def __init__(self, matcher: LLMatcher, text_ids: Mapping[int, int]) -> None:
        self._matcher = matcher
        self._text_ids = text_ids

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Take ``tokens``; False if the grammar does not allow them, after which the matcher is of no
        use."""
        if self._text_ids.keys().isdisjoint(tokens):
            return self._matcher.consume_tokens(list(tokens))
        return all(self._matcher.consume_token(self._read(token)) for token in tokens)

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        """Take ``tokens`` as far as the grammar allows them; return how many that is."""
        for taken, token in enumerate(tokens):
            if not self._matcher.try_consume_tokens([self._read(token)]):
                return taken
        return len(tokens)

    def _read(self, token: int) -> int:
        text_id = self._text_ids.get(token)
        return token if text_id is None or self._matcher.validate_tokens([token]) else text_id

    def compute_mask(self, address: int, num_bytes: int) -> None:
        """Write the mask of what may come next, text ids included, to ``address``. Raises GrammarError if a
        limit is met, or the matcher is of no use."""
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        raise_error(self._matcher)

    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()

    def is_stopped(self) -> bool:
        """Whether the output must end here."""
        return self._matcher.is_stopped()

    def copy(self) -> GrammarMatcher:
        """Return a matcher in the same state, independent of this one."""
        return GrammarMatcher(self._matcher.deep_copy(), self._text_ids)


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher, vocabulary: GuidedVocabulary) -> None:
        self._start = start
        self.vocabulary = vocabulary

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the grammar's start, independent of all others."""
        return GrammarMatcher(self._start.deep_copy(), self.vocabulary.text_ids)
