"""A worker's KV pool as the connector sees it: bytes of pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """[start, end) of each run of adjacent page ids, in order."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs


def _bytes_of(pages: Tensor) -> memoryview:
    return pages.view(torch.uint8).reshape(-1).numpy().data


class PoolMemory:
    """``connector.transport.PageMemory`` over the pool tensor, whose blocks are each one range of bytes.

    A host pool is read and written in place. A device pool goes through host memory: the copy to the host is
    ordered after the kernels that wrote the pages, as it is issued on the same (default) stream.
    """

    def __init__(self, pool: Tensor) -> None:
        if not pool.is_contiguous():
            raise ValueError("the KV pool must be contiguous: a block is one message")
        self._pool = pool
        self._on_host = pool.device.type == "cpu"

    @property
    def page_bytes(self) -> int:
        return self._pool[0].nbytes

    def source(self, pages: Sequence[int]) -> list[memoryview]:
        if self._on_host:
            return self.target(pages)
        return [_bytes_of(self._pool[start:end].cpu()) for start, end in _runs(pages)]

    def target(self, pages: Sequence[int]) -> list[memoryview]:
        if self._on_host:
            return [_bytes_of(self._pool[start:end]) for start, end in _runs(pages)]
        shape = self._pool.shape[1:]
        return [
            _bytes_of(torch.empty((end - start, *shape), dtype=self._pool.dtype))
            for start, end in _runs(pages)
        ]

    def landed(self, pages: Sequence[int], views: list[memoryview]) -> None:
        if self._on_host:
            return
        for (start, end), view in zip(_runs(pages), views, strict=True):
            staged = torch.frombuffer(view, dtype=self._pool.dtype)
            self._pool[start:end].copy_(staged.view(self._pool[start:end].shape))
