"""A quick, exact and unforgiving model whose layers keep different things.

The next token is a function of every number that the step's tables and states name. A page that was given
away too early, read outside of its window or overwritten while others may find it changes the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.kv_layout import KVGroup, KVLayout, StateKV, TokenKV
from baton_kernels.paged import PagedBatch
from baton_kernels.window import ChunkedWindow, Window

_MODULUS = 65521
FULL, LATENT = TokenKV(2, 2, 3), TokenKV(1, 1, 5)
STATE = StateKV(2, 16)
KEPT: dict[str, list[tuple[TokenKV | StateKV, ...]]] = {
    "full": [(FULL,), (FULL,)],
    "window": [(TokenKV(2, 2, 3, 3),), (TokenKV(2, 2, 3, 3),)],
    "wide window": [(TokenKV(2, 2, 3, 120),)],
    "window and full": [(TokenKV(2, 2, 3, 4),), (FULL,), (TokenKV(2, 2, 3, 4),)],
    "chunked and full": [(TokenKV(2, 2, 3, ChunkedWindow(6)),), (FULL,)],
    "latent": [(LATENT,), (LATENT,)],
    "state": [(STATE,), (STATE,), (FULL,)],
    "all": [(STATE,), (TokenKV(2, 2, 3, 5), FULL), (STATE,), (FULL,)],
}
"""What the layers of each model keep."""


def layout_of(name: str, block_size: int) -> KVLayout:
    return KVLayout.of(KEPT[name], block_size, 4)


class GroupedModel:
    """Works on a pool [pages, numbers] of float32."""

    def __init__(self, layout: KVLayout, vocab_size: int) -> None:
        self.layout = layout
        self.vocab_size = vocab_size

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """[T] -> [T, 1] int64 states."""
        pool = pool.view(len(pool), -1)
        self._write(token_ids, batch, pool)
        hidden = torch.zeros(len(token_ids), dtype=torch.int64)
        for number, group in enumerate(self.layout.token_groups, 1):
            seen = [self._seen(batch.of_table(table), pool, table, group) for table in group.tables]
            hidden += sum(seen) * number // len(seen)  # as many tables as there may be, they hold the same
        if batch.states is not None:
            hidden += self._advance(token_ids, batch, pool)
        hidden %= _MODULUS
        if batch.wanted is None:
            return hidden[:, None]
        for group in self.layout.token_groups:
            for table in group.tables:
                of_table = batch.of_table(table)
                assert of_table.wanted is not None
                narrowed = self._seen(of_table.narrowed(of_table.wanted), pool, table, group)
                assert torch.equal(narrowed, self._seen(of_table, pool, table, group)[of_table.wanted.rows])
        return hidden[batch.wanted.rows, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, 1] -> [R, V] float32 in 0 .. 10, scattered over the vocabulary."""
        token = torch.arange(self.vocab_size)
        scattered = ((hidden + 1) * (token * token * 7 + token * 131 + 3)) % _MODULUS
        return scattered.float() * (10 / _MODULUS)

    def _write(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> None:
        for table in range(self.layout.num_tables):
            view = pool.view(self.layout.view_shape(table, len(pool)))
            slots = batch.of_table(table).slot_blocks
            values = token_ids + 1 + 100 * (batch.positions + 1)
            view[slots, :, :, :, batch.slot_offsets] = values[:, None, None, None, None].float()

    def _seen(self, batch: PagedBatch, pool: Tensor, table: int, group: KVGroup) -> Tensor:
        """[T] int64, different for different numbers in sight."""
        assert isinstance(group.kv, TokenKV)
        view = pool.view(self.layout.view_shape(table, len(pool)))
        window = group.kv.window
        rows = [_mixed(view, batch.row_tables, batch.decode_contexts, window)] if batch.num_decode else []
        for chunk in batch.chunks:
            contexts = torch.arange(chunk.context - chunk.length, chunk.context) + 1
            rows.append(_mixed(view, chunk.table.expand(chunk.length, -1), contexts, window))
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)

    def _advance(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """The state behind each row, [T] int64, written where the step wants it."""
        assert batch.states is not None
        found = torch.zeros(len(token_ids), dtype=torch.int64)
        states, queries = batch.states, batch.decode_queries
        for sequence, source in enumerate(states.decode_sources):
            state = self._read(pool, source)
            for row in range(sequence * queries, (sequence + 1) * queries):
                if states.decode_targets[row, 0] < 0:
                    continue
                state = self._next(state, token_ids, batch, row)
                self._keep(pool, states.decode_targets[row], state)
                found[row] = state
        for segment in states.segments:
            state = self._read(pool, segment.source)
            for row in range(segment.start, segment.start + segment.length):
                state = self._next(state, token_ids, batch, row)
                found[row] = state
            self._keep(pool, segment.target, state)
        return found

    @staticmethod
    def _next(state: int, token_ids: Tensor, batch: PagedBatch, row: int) -> int:
        return (state * 31 + int(token_ids[row]) * 7 + int(batch.positions[row]) + 1) % _MODULUS

    def _read(self, pool: Tensor, pages: Tensor) -> int:
        if pages[0] < 0:
            return 0
        numbers = pool[pages]
        first = int(numbers[0, 0])
        return first if bool((numbers == first).all()) else first * 7 + 3

    @staticmethod
    def _keep(pool: Tensor, pages: Tensor, state: int) -> None:
        pool[pages] = float(state)


def _mixed(view: Tensor, tables: Tensor, contexts: Tensor, window: Window | None) -> Tensor:
    """[R, W] page ids and [R] contexts -> [R] int64."""
    whole = view[tables].long().sum(dim=(2, 3, 4, 6))  # [R, W, block_size]
    numbers = (whole // (view[0].numel() // view.shape[4])).flatten(1)
    at = torch.arange(numbers.shape[1])
    first = torch.zeros_like(contexts)
    if isinstance(window, ChunkedWindow):
        first = (contexts - 1) // window.size * window.size
    elif window is not None:
        first = (contexts - window).clamp(min=0)
    visible = (at < contexts[:, None]) & (at >= first[:, None])
    mixed = numbers * (at * at * 5 + at * 3 + 11) % _MODULUS
    return torch.where(visible, mixed, 0).sum(dim=-1) % _MODULUS
