"""Sequences as drafters see them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class Tokens:
    """Some tokens, and no engine. Compared and hashed by identity."""

    def __init__(self, count: int = 0, tokens: Iterable[int] = (), salt: int = 0) -> None:
        """``tokens``, or ``count`` arbitrary ones below 256."""
        self.token_ids = array(
            "q", tokens or [(i * i * 31 + i * 17 + salt * 7 + 5) % 256 for i in range(count)]
        )
        self.max_len = 1 << 20
        self.num_prompt = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
