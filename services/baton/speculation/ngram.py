"""Prompt lookup: drafts what followed the last few tokens at their previous occurrence
(https://github.com/apoorvumang/prompt-lookup-decoding). It costs no model, and pays where answers repeat
their prompt or themselves: summaries, edits, extraction, code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from baton.speculation.drafter import TokenSequence

WINDOW = 32768
"""Tokens from the end that are searched, which bounds the work of a step."""


class NgramDrafter:
    """A drafter without state. One draft is a scan of at most ``WINDOW`` int64 for the last token, then of
    the places where that is; measured in docs/speculation.md."""

    wants_hidden = False

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        """Looks for the last ``ngram_max`` tokens, or as many of them as are found, but at least
        ``ngram_min``."""
        self._min = ngram_min
        self._max = ngram_max

    def draft(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[list[int]]:
        return [self._one(seq, limit) for seq, limit in zip(sequences, limits, strict=True)]

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        raise AssertionError("n-grams want no hidden states")

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def _one(self, sequence: TokenSequence, limit: int) -> list[int]:
        tokens = np.frombuffer(sequence.token_ids, dtype=np.int64)[-WINDOW:]
        end = self._find(tokens)
        if end is None:
            return []
        found: list[int] = tokens[end + 1 : end + 1 + limit].tolist()
        # A run that repeats itself goes on with its own beginning.
        period = len(tokens) - (end + 1)
        while len(found) < limit:
            found.append(found[len(found) - period])
        return found

    def _find(self, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int | None:
        """The end of the previous occurrence of the longest run that ends the tokens, or None."""
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        found = None
        for length in range(1, self._max + 1):
            if not len(ends):
                break
            if length >= self._min:
                found = int(ends[-1])
            ends = ends[ends >= length]
            if length < len(tokens):
                ends = ends[tokens[ends - length] == tokens[-1 - length]]
        return found
