"""Makes token ids or text from the pieces of a prompt."""

from __future__ import annotations

import random

from baton.bench.workload.items import Item, PromptPiece
from baton.text.tokenizer import Tokenizer


class Vocabulary:
    """The tokens that prompts are made up of: every token of the model with text, but for special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special.ids
        ids = (id_ for id_ in range(tokenizer.vocab_size) if id_ not in special)
        self._ids = [id_ for id_ in ids if tokenizer.token(id_)]
        self._tokenizer = tokenizer

    def ids(self, item: Item) -> list[int]:
        """Return an item's prompt as token ids."""
        if isinstance(item.prompt, str):
            return self._tokenizer.encode(item.prompt)
        return [id_ for piece in item.prompt for id_ in self._piece(piece)]

    def text(self, item: Item) -> str:
        """Return an item's prompt as text. Made-up tokens need not survive the way through text, so the
        server may count about a tenth more."""
        if isinstance(item.prompt, str):
            return item.prompt
        return self._tokenizer.decode(self.ids(item))

    def probe(self, tokens: int) -> tuple[PromptPiece, ...]:
        """Return a prompt to try a server with, which no workload has."""
        return (PromptPiece("probe", tokens),)

    def _piece(self, piece: PromptPiece) -> list[int]:
        return random.Random(piece.seed).choices(self._ids, k=piece.tokens)
