"""A worker's KV pool as its links see it: the bytes of wire blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.connector.transport import DeviceView, PageMemory


class PoolMemory:
    """``connector.transport.KVMemory`` over the pool tensor
    ``[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]``."""

    def __init__(self, pool: Tensor) -> None:
        if not pool.is_contiguous():
            raise ValueError("the KV pool must be contiguous: a block is one message")
        self._pool = pool

    def part(self, block_size: int, heads: range | None = None) -> PageMemory:
        """The pool as wire blocks of ``block_size`` tokens and these heads (None: all).

        With ``ratio`` wire blocks in a page, the wire block ``page * ratio + sub`` holds the page's tokens
        from ``sub * block_size`` on. Its bytes are what a pool of that block size with these heads alone
        would hold: ``[heads, num_layers, 2, block_size, head_dim]``.

        Raises ValueError for a block size that does not divide the pool's, and for heads it does not have.
        """
        num_heads, pool_block_size = self._pool.shape[1], self._pool.shape[4]
        heads = range(num_heads) if heads is None else heads
        if block_size < 1 or pool_block_size % block_size:
            raise ValueError(
                f"block_size {block_size} does not divide the pool's block size, {pool_block_size}"
            )
        if not heads or heads.step != 1 or heads.start < 0 or heads.stop > num_heads:
            raise ValueError(f"heads {heads}: adjacent heads out of 0 to {num_heads - 1} are allowed")
        return _Part(self._pool, pool_block_size // block_size, heads)


class _Part:
    """``connector.transport.PageMemory`` over a part of the pool.

    A copy from a device is ordered after the kernels that wrote the pages, and one to it before those that
    read them, as it is issued on the same (default) stream.
    """

    def __init__(self, pool: Tensor, ratio: int, heads: range) -> None:
        num_blocks, num_heads, num_layers, two, _, _ = pool.shape
        # A wire block is some rows of the pool, each contiguous: a head, or of each layer's K and V a part.
        rows_per_head = 1 if ratio == 1 else num_layers * two
        self._num_blocks = num_blocks * ratio
        self._ratio = ratio
        self._rows_per_page = num_heads * rows_per_head * ratio
        self._rows = _in_words(pool).view(num_blocks * self._rows_per_page, -1)
        rows = range(heads.start * rows_per_head * ratio, heads.stop * rows_per_head * ratio, ratio)
        self._rows_of_first = torch.tensor(rows, device=pool.device)
        self.block_bytes = len(rows) * self._rows[0].nbytes
        self._page_bytes = pool[0].nbytes
        self._start = pool[0, : heads.start].nbytes
        self._on_host = pool.device.type == "cpu"
        self._pointer = pool.data_ptr()
        in_place = self._on_host and ratio == 1
        self._pool_bytes = pool.view(torch.uint8).view(-1).numpy().data if in_place else None

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        self._check(blocks)
        pool = self._pool_bytes
        return [] if pool is None else [pool[start : start + size] for start, size in self._spans(blocks)]

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        self._check(blocks)
        if self._on_host or self._ratio > 1:
            return []
        device = self._rows.device.index
        return [DeviceView(device, self._pointer + start, size) for start, size in self._spans(blocks)]

    def _spans(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Where in the pool the bytes of contiguous wire blocks begin, and how many there are."""
        whole = self.block_bytes == self._page_bytes
        runs = _runs(blocks) if whole else [(block, 1) for block in blocks]
        return [(block * self._page_bytes + self._start, count * self.block_bytes) for block, count in runs]

    def gather(self, blocks: Sequence[int], into: memoryview) -> None:
        rows, copy = self._rows_of(blocks), self._as_rows(into)
        if self._on_host:
            torch.index_select(self._rows, 0, rows, out=copy)
        else:
            copy.copy_(torch.index_select(self._rows, 0, rows))

    def scatter(self, blocks: Sequence[int], piece: memoryview) -> None:
        rows, copy = self._rows_of(blocks), self._as_rows(piece)
        self._rows.index_copy_(0, rows, copy.to(self._rows.device))

    def _as_rows(self, piece: memoryview) -> Tensor:
        words = torch.frombuffer(piece, dtype=torch.uint8).view(self._rows.dtype)
        return words.view(-1, self._rows.shape[1])

    def _rows_of(self, blocks: Sequence[int]) -> Tensor:
        """Where in ``_rows`` the bytes of these wire blocks are, in order."""
        self._check(blocks)
        first = [block // self._ratio * self._rows_per_page + block % self._ratio for block in blocks]
        return (torch.tensor(first, device=self._rows.device)[:, None] + self._rows_of_first).view(-1)

    def _check(self, blocks: Sequence[int]) -> None:
        """A slice would take an id beyond the pool's end for fewer bytes, and a negative one for others."""
        if not blocks or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            allowed = f"ids of 0 to {self._num_blocks - 1} are allowed, at least one"
            raise ValueError(f"wire blocks {list(blocks)}: {allowed}")


def pinned(size: int) -> memoryview:
    """Host memory that a CUDA device copies from and to by itself, without a copy by the CPU in between."""
    data: memoryview = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
    return data


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """First id and length of each run of adjacent block ids, in order."""
    adjacent = range(blocks[0], blocks[0] + len(blocks))
    if tuple(blocks) == tuple(adjacent):  # nearly always, and ten times as fast
        return [(blocks[0], len(blocks))]
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def _in_words(pool: Tensor) -> Tensor:
    """The pool with its last dimension in words as long as it allows: gathering them costs less than
    gathering numbers, and only bytes matter."""
    row_bytes = pool.shape[-1] * pool.itemsize
    words = {16: torch.complex128, 8: torch.int64}
    return pool.view(next((dtype for size, dtype in words.items() if row_bytes % size == 0), torch.uint8))
