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

    @property
    def device(self) -> int | None:
        """The index of the CUDA device that it is on, if it is on one."""
        device = self._pool.device
        if device.type != "cuda":
            return None
        return torch.cuda.current_device() if device.index is None else device.index

    def part(self, block_size: int, heads: range | None = None, layers: range | None = None) -> PageMemory:
        """The pool as wire blocks of ``block_size`` tokens, these heads and these layers (None: all), both
        counted from the pool's first.

        With ``ratio`` wire blocks in a page, the wire block ``page * ratio + sub`` holds the page's tokens
        from ``sub * block_size`` on. Its bytes are what a pool of that block size with these heads and layers
        alone would hold: ``[heads, layers, 2, block_size, head_dim]``.

        Raises ValueError for a block size that does not divide the pool's, and for heads or layers that it
        does not have.
        """
        _, num_heads, num_layers, _, pool_block_size, _ = self._pool.shape
        heads = range(num_heads) if heads is None else heads
        layers = range(num_layers) if layers is None else layers
        if block_size < 1 or pool_block_size % block_size:
            raise ValueError(
                f"block_size {block_size} does not divide the pool's block size, {pool_block_size}"
            )
        for name, some, count in (("heads", heads, num_heads), ("layers", layers, num_layers)):
            if not some or some.step != 1 or some.start < 0 or some.stop > count:
                raise ValueError(f"{name} {some}: adjacent {name} out of 0 to {count - 1} are allowed")
        return _Part(self._pool, pool_block_size // block_size, heads, layers)


class _Part:
    """``connector.transport.PageMemory`` over a part of the pool.

    A copy from a device is ordered after the kernels that wrote the pages, and one to it before those that
    read them, as it is issued on the same (default) stream.
    """

    def __init__(self, pool: Tensor, ratio: int, heads: range, layers: range) -> None:
        num_blocks, num_heads, num_layers, two, _, _ = pool.shape
        # A wire block is some rows of the pool, each contiguous: a head, or of each layer's K and V a part.
        by_head = ratio == 1 and len(layers) == num_layers
        rows_per_head = 1 if by_head else num_layers * two
        of_head = range(1) if by_head else range(layers.start * two, layers.stop * two)
        rows = [(head * rows_per_head + row) * ratio for head in heads for row in of_head]
        self._num_blocks = num_blocks * ratio
        self._ratio = ratio
        self._rows_per_page = num_heads * rows_per_head * ratio
        self._rows = _in_words(pool).view(num_blocks * self._rows_per_page, -1)
        self._rows_of_first = torch.tensor(rows, device=pool.device)
        self.block_bytes = len(rows) * self._rows[0].nbytes
        self._page_bytes = pool[0].nbytes
        self._strips = _strips(pool, heads, layers)
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
        size = self._page_bytes
        if self.block_bytes == size:
            return [(block * size, count * size) for block, count in _runs(blocks)]
        return [(block * size + start, length) for block in blocks for start, length in self._strips]

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


def _strips(pool: Tensor, heads: range, layers: range) -> list[tuple[int, int]]:
    """Where in a page, and how long, the contiguous bytes of these heads and layers are."""
    page = pool[0]
    if len(layers) == page.shape[1]:
        return [(page[: heads.start].nbytes, page[heads.start : heads.stop].nbytes)]
    length, before = (
        page[0, some].nbytes for some in (slice(layers.start, layers.stop), slice(layers.start))
    )
    return [(page[:head].nbytes + before, length) for head in heads]


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
