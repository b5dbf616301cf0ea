"""From the pieces of a prompt to token ids or text."""

from __future__ import annotations

import random

from baton.bench.workload.items import Item, Piece
from baton.text.tokenizer import Tokenizer


class Vocabulary:
    """The words of a model that prompts are made up of: every token with text that is not a special one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special.ids
        ids = (id_ for id_ in range(tokenizer.vocab_size) if id_ not in special)
        self._ids = [id_ for id_ in ids if tokenizer.token(id_)]
        self._tokenizer = tokenizer

    def ids(self, item: Item) -> list[int]:
        """An item's prompt as token ids."""
        if isinstance(item.prompt, str):
            return self._tokenizer.encode(item.prompt)
        return [id_ for piece in item.prompt for id_ in self._piece(piece)]

    def text(self, item: Item) -> str:
        """An item's prompt as text. Made-up tokens need not come back from it as they went in, so that the
        server may count about a tenth more."""
        if isinstance(item.prompt, str):
            return item.prompt
        return self._tokenizer.decode(self.ids(item))

    def probe(self, tokens: int) -> tuple[Piece, ...]:
        """A prompt to try a server with, which no workload has."""
        return (Piece("probe", tokens),)

    def _piece(self, piece: Piece) -> list[int]:
        return random.Random(piece.seed).choices(self._ids, k=piece.tokens)
