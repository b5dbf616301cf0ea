"""A model's vocabulary as llguidance needs it, in which a token can be named and can stand for its text.

llguidance knows a token either by name or by its bytes. It takes special tokens by name, and with them every
added token of the form ``<…>``: ``<tool_call>`` in Qwen's tokenizers is one, although its text may come in
any answer. So a token of the second kind gets another id, beyond the model's, under which it is its text. The
grammar of a tool call names the token; a form that holds the same text is written with the other id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from llguidance import LLTokenizer, TokenizerWrapper

WORD_BITS = 32
"""Tokens in a word of a mask."""

_LONE_BYTE = b"\xff"
"""The token of the byte by which llguidance tells special tokens, and that no text has."""


class TextRun(NamedTuple):
    """Consecutive tokens whose text ids are consecutive too."""

    first: int
    """The first token's own id."""
    text_id: int
    """The first token's text id."""
    size: int


class GuidedVocabulary:
    """llguidance's tokenizer of a model, and the second ids of tokens that also stand for their text."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int], text_token_ids: Sequence[int]
    ) -> None:
        """``text_token_ids``: the tokens that get a text id, ascending.

        Raises ValueError if llguidance does not know the kind of tokenizer.
        """
        plain = LLTokenizer(tokenizer_json, n_vocab=vocab_size, slices=[])
        self.vocab_size = vocab_size
        """The size of the model's logits."""
        first = -(-vocab_size // WORD_BITS) * WORD_BITS  # a mask has the text ids in words of their own
        self.text_ids: Mapping[int, int] = {
            token: first + place for place, token in enumerate(text_token_ids)
        }
        """The text id of each token that has one."""
        self.text_runs = list(_runs(self.text_ids))
        spelling = TokenizerWrapper(_Spelling(plain, first, self.text_ids))
        self.tokenizer = LLTokenizer(spelling, eos_token=eos_token_ids)


class _Spelling:
    """The bytes of all tokens, and the tokens of a text, as ``TokenizerWrapper`` asks for them."""

    bos_token_id = None

    def __init__(self, plain: LLTokenizer, first: int, text_ids: Mapping[int, int]) -> None:
        """``first``: the first text id."""
        texts = [plain.decode_bytes([token]) for token in range(plain.vocab_size)]
        # llguidance names ids without a token like this; here they have no text, and no name.
        texts = [b"" if text == b"<[%d]>" % token else text for token, text in enumerate(texts)]
        special = [token for token, text in enumerate(texts) if text and plain.is_special_token(token)]
        texts = [
            text
            or (_LONE_BYTE if plain.decode_bytes([token]) == b"" and plain.is_special_token(token) else b"")
            for token, text in enumerate(texts)
        ]
        self.eos_token_id = plain.eos_token
        self.special_token_ids = special
        self.tokens = texts + [b""] * (first - len(texts)) + [texts[token] for token in text_ids]
        self._plain = plain
        self._text_ids = text_ids
        self._barred = frozenset(special) - text_ids.keys()
        barred = sorted({texts[token] for token in self._barred}, key=len, reverse=True)
        self._barred_text = re.compile(b"|".join(map(re.escape, barred)) or b"(?!)")

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that a grammar forces, none of which is a special one."""
        tokens = self._plain.tokenize_bytes(text)
        if not self._barred.isdisjoint(tokens):
            tokens = [token for part in self._cut(text) for token in self._plain.tokenize_bytes(part)]
        return [self._text_ids.get(token, token) for token in tokens]

    def _cut(self, text: bytes) -> list[bytes]:
        """Cut each special token's spelling in ``text`` behind its first character."""
        cuts = [0, *(found.start() + 1 for found in self._barred_text.finditer(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(cuts)]


def _runs(text_ids: Mapping[int, int]) -> Iterable[TextRun]:
    run = None
    for token, text_id in text_ids.items():
        if run is not None and token == run.first + run.size:
            run = run._replace(size=run.size + 1)
            continue
        if run is not None:
            yield run
        run = TextRun(token, text_id, 1)
    if run is not None:
        yield run
