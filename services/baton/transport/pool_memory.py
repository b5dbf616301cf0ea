"""A worker's KV pool as its links see it: the bytes of wire blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from baton.net.certificates import TlsFiles
from baton.transport.base import ConnectorSettings, DeviceStaging, DeviceView, PageMemory
from baton.transport.device_copies import DeviceCopies
from baton.transport.staging import DEVICE_PIECE_BYTES, DEVICE_STAGING_BYTES, Staging, StagingRoom


def _settled(pages: Collection[int]) -> None:
    """Return at once: nothing else copies from or to the pool by itself."""


class PoolMemory:
    """``baton.transport.base.KVMemory`` over the pool tensor
    ``[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]``."""

    def __init__(self, pool: Tensor, settle: Callable[[Collection[int]], None] = _settled) -> None:
        """``settle``: returns when no copy that was started before reads or writes these pages, and may wait
        for that on any thread. It matters on a device, where a copy runs after it was started."""
        if not pool.is_contiguous():
            raise ValueError("the KV pool must be contiguous: a block is one message")
        self._pool = pool
        self._settle = settle
        on_device = pool.device.type == "cuda"
        self._copies = DeviceCopies(pool.device, pool[0, 0].nbytes) if on_device else None

    @property
    def device(self) -> int | None:
        """The index of the CUDA device that the pool is on; None: it is in host memory."""
        device = self._pool.device
        if device.type != "cuda":
            return None
        return torch.cuda.current_device() if device.index is None else device.index

    @property
    def num_heads(self) -> int:
        return self._pool.shape[1]

    @property
    def num_layers(self) -> int:
        return self._pool.shape[2]

    @property
    def token_bytes(self) -> int:
        """Size of one token's K or V of one head in one layer, in bytes."""
        return self._pool[0, 0, 0, 0, 0].nbytes

    def staging(self) -> Staging:
        """Return host memory for the pieces of this pool. For a pool on a device it is pinned, and allocated
        at once."""
        if self._copies is None:
            return Staging()
        staging = Staging(DEVICE_STAGING_BYTES, pinned, DEVICE_PIECE_BYTES)
        staging.sending.fill()
        staging.receiving.fill()
        return staging

    def device_staging(self) -> DeviceStaging | None:
        """Return memory of the device for the pieces of a pool that is on one. It is allocated piece by
        piece, as few links need it."""
        if self._copies is None:
            return None
        limit, allocate = DEVICE_STAGING_BYTES // 2, self._copies.allocate
        rooms = (StagingRoom(limit, allocate, DEVICE_PIECE_BYTES) for _ in range(2))
        return DeviceStaging(*rooms)

    def connector_settings(
        self,
        on_crash: Callable[[], None],
        host: str,
        tls: TlsFiles | None = None,
        *,
        require_rdma: bool = False,
    ) -> ConnectorSettings:
        """Return the settings of connectors that move blocks of this pool; the arguments as in
        ``ConnectorSettings``."""
        staging, on_device = self.staging(), self.device_staging()
        return ConnectorSettings(
            staging, on_crash, host, self.device, on_device, self.enter, require_rdma, tls
        )

    def enter(self) -> None:
        """Make the pool's device the calling thread's own, with its context: a library that finds none there
        takes the device's memory for host memory, or ends the process."""
        if self._copies is not None:
            self._copies.enter()

    def part(self, block_size: int, heads: range | None = None, layers: range | None = None) -> PageMemory:
        """Return the pool as wire blocks of ``block_size`` tokens, with these heads and these layers (None:
        all), both counted from the pool's first.

        With ``ratio`` wire blocks in a page, the wire block ``page * ratio + sub`` holds the page's tokens
        from ``sub * block_size`` on. Its bytes are what a pool of that block size with these heads and layers
        alone would hold: ``[heads, layers, 2, block_size, head_dim]``.

        Raises ValueError for a block size that does not divide the pool's, and for heads or layers that the
        pool does not have.
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
        ratio = pool_block_size // block_size
        return _Part(self._pool, ratio, heads, layers, self._copies, self._settle)


class _Part:
    """``baton.transport.base.PageMemory`` over a part of the pool."""

    def __init__(
        self,
        pool: Tensor,
        ratio: int,
        heads: range,
        layers: range,
        copies: DeviceCopies | None,
        settle: Callable[[Collection[int]], None],
    ) -> None:
        num_blocks, num_heads, num_layers, two, _, _ = pool.shape
        # A wire block is some rows of the pool, each contiguous: a head, or a part of each layer's K and V.
        by_head = ratio == 1 and len(layers) == num_layers
        rows_per_head = 1 if by_head else num_layers * two
        of_head = range(1) if by_head else range(layers.start * two, layers.stop * two)
        rows = [(head * rows_per_head + row) * ratio for head in heads for row in of_head]
        self._num_blocks = num_blocks * ratio
        self._ratio = ratio
        self._rows_per_page = num_heads * rows_per_head * ratio
        self._rows = _in_words(pool).view(num_blocks * self._rows_per_page, -1)
        self._rows_of_first = torch.tensor(rows)
        self.block_bytes = len(rows) * self._rows[0].nbytes
        self._page_bytes = pool[0].nbytes
        self._strips = _strips(pool, heads, layers)
        self._copies = copies
        self._settle = settle
        self._bytes = pool.view(torch.uint8).view(-1)
        self._pointer = pool.data_ptr()
        in_place = copies is None and ratio == 1
        self._pool_bytes = self._bytes.numpy().data if in_place else None

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        self._check(blocks)
        pool = self._pool_bytes
        return [] if pool is None else [pool[start : start + size] for start, size in self._spans(blocks)]

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        self._check(blocks)
        if self._copies is None or self._ratio > 1:
            return []
        self._settle(blocks)
        device, pool = self._copies.index, self._bytes
        spans = self._spans(blocks)
        return [DeviceView(device, self._pointer + start, size, pool) for start, size in spans]

    def whole(self) -> memoryview | DeviceView | None:
        if self._copies is None or self._ratio > 1:
            return self._pool_bytes
        return DeviceView(self._copies.index, self._pointer, self._rows.nbytes, self._bytes)

    def _spans(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return the offset in the pool and the length, in bytes, of each contiguous run of these wire
        blocks."""
        size = self._page_bytes
        if self.block_bytes == size:
            return [(block * size, count * size) for block, count in _runs(blocks)]
        return [(block * size + start, length) for block in blocks for start, length in self._strips]

    def gather(self, blocks: Sequence[int], into: memoryview | DeviceView) -> None:
        rows, copy = self._rows_of(blocks), self._as_rows(into)
        if self._copies is None:
            torch.index_select(self._rows, 0, rows, out=copy)
        else:
            self._settle(self._pages(blocks))
            self._copies.gather(self._rows, rows, copy)

    def scatter(self, blocks: Sequence[int], piece: memoryview | DeviceView) -> None:
        rows, copy = self._rows_of(blocks), self._as_rows(piece)
        if self._copies is None:
            self._rows.index_copy_(0, rows, copy)
        else:
            self._settle(self._pages(blocks))
            self._copies.scatter(self._rows, rows, copy)

    def _pages(self, blocks: Sequence[int]) -> Collection[int]:
        return blocks if self._ratio == 1 else {block // self._ratio for block in blocks}

    def _as_rows(self, piece: memoryview | DeviceView) -> Tensor:
        words = byte_tensor(piece).view(self._rows.dtype)
        return words.view(-1, self._rows.shape[1])

    def _rows_of(self, blocks: Sequence[int]) -> Tensor:
        """Return the indices in ``_rows`` of the bytes of these wire blocks, in order."""
        self._check(blocks)
        first = [block // self._ratio * self._rows_per_page + block % self._ratio for block in blocks]
        return (torch.tensor(first)[:, None] + self._rows_of_first).view(-1)

    def _check(self, blocks: Sequence[int]) -> None:
        """Raise ValueError for ids that the pool does not have: a slice would take an id beyond the pool's
        end for fewer bytes, and a negative id for others."""
        if not blocks or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            allowed = f"ids of 0 to {self._num_blocks - 1} are allowed, at least one"
            raise ValueError(f"wire blocks {list(blocks)}: {allowed}")


def _strips(pool: Tensor, heads: range, layers: range) -> list[tuple[int, int]]:
    """Return the offset in a page and the length, in bytes, of each contiguous run of these heads and
    layers."""
    page = pool[0]
    if len(layers) == page.shape[1]:
        return [(page[: heads.start].nbytes, page[heads.start : heads.stop].nbytes)]
    length, before = (
        page[0, some].nbytes for some in (slice(layers.start, layers.stop), slice(layers.start))
    )
    return [(page[:head].nbytes + before, length) for head in heads]


def byte_tensor(memory: memoryview | DeviceView) -> Tensor:
    """Return a tensor over these very bytes."""
    if isinstance(memory, memoryview):
        return torch.frombuffer(memory, dtype=torch.uint8)
    if isinstance(memory.owner, Tensor):
        start = memory.pointer - memory.owner.data_ptr()
        return memory.owner[start : start + memory.nbytes]
    return torch.as_tensor(memory, device=f"cuda:{memory.device}")


def pinned(size: int) -> memoryview:
    """Return host memory that a CUDA device copies from and to by itself, without a copy by the CPU in
    between."""
    data: memoryview = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
    return data


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first id and length of each run of adjacent block ids, in order."""
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
    """Return the pool with its last dimension in words as long as it allows: gathering words costs less than
    gathering numbers, and only bytes matter."""
    row_bytes = pool.shape[-1] * pool.itemsize
    words = {16: torch.complex128, 8: torch.int64}
    return pool.view(next((dtype for size, dtype in words.items() if row_bytes % size == 0), torch.uint8))
