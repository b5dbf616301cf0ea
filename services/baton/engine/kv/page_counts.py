"""How many pages sequences take, by the groups of a model's layers. Pure."""

from __future__ import annotations

from baton.engine.kv.arriving import first_seen
from baton_kernels.kv_layout import KVGroup, KVLayout, TokenKV
from baton_kernels.window import ChunkedWindow


class PageCounts:
    """The pages of sequences in pools of one layout, whose prompts can be computed ``chunk`` tokens at a
    time."""

    def __init__(self, layout: KVLayout, chunk: int) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.num_tables = layout.num_tables
        self.state_pages = layout.state_pages
        self._chunk = chunk
        self._is_simple = all(group.kind in ("full", "latent") for group in layout.groups)

    def blocks(self, num_tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, group: KVGroup, num_tokens: int) -> int:
        """The first block of a token group that a token behind ``num_tokens`` sees."""
        assert isinstance(group.kv, TokenKV)
        return first_seen(group.kv.window, num_tokens) // self.block_size

    def of(self, num_tokens: int) -> int:
        """The pages that a sequence of ``num_tokens`` may hold at once while it is computed."""
        if self._is_simple:
            return self.num_tables * -(-num_tokens // self.block_size)
        pages = self.state_pages if num_tokens else 0
        for group in self.layout.token_groups:
            pages += len(group.tables) * self._most_blocks(group, num_tokens)
        return pages

    def _most_blocks(self, group: KVGroup, num_tokens: int) -> int:
        blocks = self.blocks(num_tokens)
        assert isinstance(group.kv, TokenKV)
        match group.kv.window:
            case None:
                return blocks
            case ChunkedWindow(size=size):
                seen = size
            case window:
                seen = window
        # A window reaches into a block that it has left for the most part, and so does a chunk.
        return min(blocks, -(-(seen - 1 + self._chunk) // self.block_size) + 1)

    def computed(self, num_tokens: int) -> int:
        """The pages of a sequence whose ``num_tokens`` tokens are computed, without those that no later token
        sees."""
        blocks = self.blocks(num_tokens)
        pages = self.state_pages
        for group in self.layout.token_groups:
            pages += len(group.tables) * (blocks - self.first_seen(group, num_tokens))
        return pages

    def most_tokens(self, num_pages: int, limit: int) -> int:
        """The tokens of the longest sequence that ``num_pages`` pages hold, ``limit`` at most."""
        if self._is_simple:
            return min(limit, num_pages // self.num_tables * self.block_size)
        fits, too_many = 0, limit + 1
        while too_many - fits > 1:
            tried = (fits + too_many) // 2
            if self.of(tried) <= num_pages:
                fits = tried
            else:
                too_many = tried
        return fits
