"""A worker's KV pool as its links see it: the bytes of wire blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.connector.transport import PageMemory


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """[start, end) of each run of adjacent block ids, in order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).reshape(-1).numpy().data


def _check_ids(blocks: Sequence[int], num_blocks: int) -> None:
    """A slice would take an id beyond the pool's end for fewer bytes, and a negative one for others."""
    if not blocks or min(blocks) < 0 or max(blocks) >= num_blocks:
        raise ValueError(f"wire blocks {list(blocks)}: one or more ids of 0 to {num_blocks - 1} are allowed")


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
        ratio = pool_block_size // block_size
        if ratio == 1 and self._pool.device.type == "cpu":
            return _InPlace(self._pool, heads)
        return _Staged(self._pool, ratio, heads)


class _InPlace:
    """Whole pages of a host pool, or a range of heads of them, read and written where they are."""

    def __init__(self, pool: Tensor, heads: range) -> None:
        self._bytes = _bytes_of(pool)
        self._num_blocks = pool.shape[0]
        self._page_bytes = pool[0].nbytes
        self._start = pool[0, : heads.start].nbytes
        self.block_bytes = pool[0, heads.start : heads.stop].nbytes

    def source(self, blocks: Sequence[int]) -> list[memoryview]:
        _check_ids(blocks, self._num_blocks)
        if self.block_bytes == self._page_bytes:
            return [
                self._bytes[start * self._page_bytes : end * self._page_bytes] for start, end in _runs(blocks)
            ]
        starts = (block * self._page_bytes + self._start for block in blocks)
        return [self._bytes[start : start + self.block_bytes] for start in starts]

    def target(self, blocks: Sequence[int]) -> list[memoryview]:
        return self.source(blocks)

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        """They landed where they belong."""


class _Staged:
    """Wire blocks that are not contiguous in the pool, or of a pool on a device: a message is gathered into
    host memory of its own, and scattered from it.

    The copy to the host is ordered after the kernels that wrote the pages, as it is issued on the same
    (default) stream.
    """

    def __init__(self, pool: Tensor, ratio: int, heads: range) -> None:
        # Only bytes matter, and copying is quicker in words of eight.
        words = pool.view(torch.int64 if pool.shape[-1] * pool.itemsize % 8 == 0 else torch.uint8)
        num_blocks, _, layers, two, block_size, width = words.shape
        shape = (num_blocks, len(heads), layers, two, ratio, block_size // ratio, width)
        self._part = (
            words[:, heads.start : heads.stop].view(shape).movedim(4, 1)
        )  # [num_blocks, ratio, heads, layers, 2, wire block size, words]
        self.block_bytes = self._part[0, 0].nbytes

    def source(self, blocks: Sequence[int]) -> list[memoryview]:
        return [_bytes_of(self._part[self._places(blocks)].cpu().contiguous())]

    def target(self, blocks: Sequence[int]) -> list[memoryview]:
        return [_bytes_of(torch.empty(len(blocks) * self.block_bytes, dtype=torch.uint8))]

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        (view,) = views
        staged = torch.frombuffer(view, dtype=self._part.dtype).view(len(blocks), *self._part.shape[2:])
        self._part[self._places(blocks)] = staged.to(self._part.device)

    def _places(self, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Page and place within it of each wire block."""
        num_pages, ratio = self._part.shape[:2]
        _check_ids(blocks, num_pages * ratio)
        ids = torch.tensor(blocks, device=self._part.device)
        return ids // ratio, ids % ratio
