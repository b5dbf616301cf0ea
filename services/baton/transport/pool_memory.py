"""A worker's KV pool as its links see it: the bytes of wire blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from baton.net.certificates import TlsFiles
from baton.transport.base import (
    BlockForm,
    ConnectorSettings,
    DeviceStaging,
    DeviceView,
    GroupPart,
    PageMemory,
)
from baton.transport.block_names import GROUP_SHIFT, group_of, page_of, place_of
from baton.transport.converted_part import ConvertedPart, GroupConversion
from baton.transport.device_copies import DeviceCopies
from baton.transport.kv_types import FP8_DYNAMIC, convertible_to
from baton.transport.page_geometry import Geometry, geometry_of, whole_part
from baton.transport.piece_bytes import byte_tensor
from baton.transport.staging import DEVICE_PIECE_BYTES, DEVICE_STAGING_BYTES, Staging, StagingRoom
from baton_kernels.kv_fp8 import UNSCALED, KVConversion, KVScales
from baton_kernels.kv_layout import KVGroup, KVLayout, TokenKV

UNSCALED_LAYERS: Mapping[int, KVScales] = MappingProxyType({})
"""The scales of a model whose layers have none."""


def _settled(pages: Collection[int]) -> None:
    """Return at once: nothing else copies from or to the pool by itself."""


class PoolMemory:
    """``baton.transport.base.KVMemory`` over a pool tensor: the pages ``[num_pages, numbers of a page]`` of a
    layout or, of a model with one group, ``[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]``.
    """

    def __init__(
        self,
        pool: Tensor,
        settle: Callable[[Collection[int]], None] = _settled,
        layout: KVLayout | None = None,
        kv_scales: Mapping[int, KVScales] = UNSCALED_LAYERS,
    ) -> None:
        """``settle``: returns when no copy that was started before reads or writes these pages, and may wait
        for that on any thread. It matters on a device, where a copy runs after it was started. ``layout``:
        what the pages hold; None: what the pool's shape says. ``kv_scales``: of the layers that have any in
        FP8, by which KV of other types is converted."""
        if not pool.is_contiguous():
            raise ValueError("the KV pool must be contiguous: a block is one message")
        self._pool = pool
        self.layout = _layout_of(pool) if layout is None else layout
        self._settle = settle
        self._kv_scales = kv_scales
        on_device = pool.device.type == "cuda"
        self._copies = DeviceCopies(pool.device, _largest_row(self.layout)) if on_device else None

    @property
    def device(self) -> int | None:
        """The index of the CUDA device that the pool is on; None: it is in host memory."""
        device = self._pool.device
        if device.type != "cuda":
            return None
        return torch.cuda.current_device() if device.index is None else device.index

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

    def part(
        self, block_size: int, parts: Sequence[GroupPart] | None = None, arrives_as: str = ""
    ) -> PageMemory:
        """Return the pool as wire blocks of ``block_size`` tokens, with this part of each group (None: all),
        counted from the pool's first head and the group's first layer here.

        With ``ratio`` wire blocks in a page, the wire block ``page * ratio + sub`` holds the page's tokens
        from ``sub * block_size`` on. Its bytes are what a block of that size with these heads and layers
        alone would hold: ``[heads, layers, vectors, block_size, dim]``.

        ``arrives_as``: the type of the K and V that arrive, if it is not the pool's: then the part can only
        be written to.

        Raises ValueError for a block size that does not divide the pool's, for heads or layers that the pool
        does not have, and for a type that cannot be converted to the pool's.
        """
        layout = self.layout
        if block_size < 1 or layout.block_size % block_size:
            raise ValueError(
                f"block_size {block_size} does not divide the pool's block size, {layout.block_size}"
            )
        if layout.scale_bytes and block_size != layout.block_size:
            raise ValueError(
                f"block_size {block_size}: blocks with scales are not divided; allowed: {layout.block_size}"
            )
        if parts is None:
            parts = [whole_part(group) for group in layout.groups]
        if len(parts) != len(layout.groups):
            raise ValueError(f"parts of {len(parts)} groups: the pool has {len(layout.groups)}")
        for group, part in zip(layout.groups, parts, strict=True):
            _check_part(group, part)
        ratio = layout.block_size // block_size
        geometries = [
            geometry_of(layout, group, part, ratio) for group, part in zip(layout.groups, parts, strict=True)
        ]
        made = _Part(self._pool, layout, ratio, geometries, self._copies, self._settle)
        if not arrives_as:
            return made
        arriving = [
            self._arriving(group, part, block_size, arrives_as)
            for group, part in zip(layout.groups, parts, strict=True)
        ]
        return ConvertedPart(made, arriving, self._copies)

    def _arriving(
        self, group: KVGroup, part: GroupPart, block_size: int, arrives_as: str
    ) -> GroupConversion | None:
        """Return how a group's blocks arrive; None: as they are in the pool."""
        kv = group.kv
        if not isinstance(kv, TokenKV):
            return None
        kept = FP8_DYNAMIC if self.layout.scale_bytes else str(self._pool.dtype).removeprefix("torch.")
        if kv.vectors != 2 or arrives_as not in convertible_to(kept):
            allowed = ", ".join(convertible_to(kept)) if kv.vectors == 2 else "none, as it keeps latents"
            raise ValueError(f"arrives_as is {arrives_as!r}; allowed for a pool of {kept}: {allowed}")
        scales = [self._kv_scales.get(group.layers[at], UNSCALED) for at in part.layers]
        source: torch.dtype = getattr(torch, arrives_as)
        make = partial(KVConversion, source, self._pool.dtype, scales, self._pool.device)
        shape = (len(part.heads), len(part.layers), kv.vectors, block_size, kv.dim)
        return GroupConversion(shape, make() if self._copies is None else self._copies.compute(make))


def _layout_of(pool: Tensor) -> KVLayout:
    """The layout of a pool of blocks of one group."""
    _, heads, layers, vectors, block_size, dim = pool.shape
    group = KVGroup(TokenKV(heads, vectors, dim), tuple(range(layers)), range(1), layers)
    return KVLayout((group,), block_size, pool.itemsize, pool[0].nbytes)


def _largest_row(layout: KVLayout) -> int:
    """The largest row that a copy moves as one, in bytes."""
    return max(geometry_of(layout, group, whole_part(group), 1).row_bytes for group in layout.groups)


def _check_part(group: KVGroup, part: GroupPart) -> None:
    if not part.heads and not part.layers:
        return
    heads = group.kv.heads if isinstance(group.kv, TokenKV) else group.kv.units
    for name, some, count in (("heads", part.heads, heads), ("layers", part.layers, len(group.layers))):
        if not some or some.step != 1 or some.start < 0 or some.stop > count:
            raise ValueError(f"{name} {some}: adjacent {name} out of 0 to {count - 1} are allowed")


class _Part:
    """``baton.transport.base.PageMemory`` over a part of the pool."""

    def __init__(
        self,
        pool: Tensor,
        layout: KVLayout,
        ratio: int,
        geometries: Sequence[Geometry],
        copies: DeviceCopies | None,
        settle: Callable[[Collection[int]], None],
    ) -> None:
        self._num_blocks = len(pool) * ratio
        self._ratio = ratio
        self._page_bytes = layout.page_bytes
        self._geometries = geometries
        self._forms = tuple(BlockForm(each.width, each.block_bytes) for each in geometries)
        self._rows = [_rows(pool, layout.page_bytes, each.row_bytes) for each in geometries]
        self._rows_of_block = [torch.tensor(each.rows, dtype=torch.int64) for each in geometries]
        self._page_of_row = [torch.tensor(each.tables, dtype=torch.int64) for each in geometries]
        self._copies = copies
        self._settle = settle
        self._bytes = pool.view(torch.uint8).view(-1)
        self._pointer = pool.data_ptr()
        self._pool_bytes = self._bytes.numpy().data if copies is None else None

    def form_of(self, blocks: Sequence[int]) -> BlockForm:
        return self._forms[self._group(blocks)]

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        group = self._group(blocks)
        pool = self._pool_bytes
        if pool is None or not self._geometries[group].is_whole:
            return []
        return [pool[start : start + size] for start, size in self._spans(group, blocks)]

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        group = self._group(blocks)
        if self._copies is None or not self._geometries[group].is_whole:
            return []
        self._settle(self._pages(blocks))
        device, pool = self._copies.index, self._bytes
        spans = self._spans(group, blocks)
        return [DeviceView(device, self._pointer + start, size, pool) for start, size in spans]

    def whole(self) -> memoryview | DeviceView | None:
        if self._ratio > 1:
            return None
        if self._copies is None:
            return self._pool_bytes
        return DeviceView(self._copies.index, self._pointer, self._bytes.nbytes, self._bytes)

    def _spans(self, group: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return the offset in the pool and the length, in bytes, of each contiguous run of these wire blocks
        of a group that is not divided."""
        size, geometry = self._page_bytes, self._geometries[group]
        pages = blocks if not group and self._ratio == 1 else [page_of(b, self._ratio) for b in blocks]
        if geometry.width == 1 and geometry.strips == ((0, 0, size),):
            return [(page * size, count * size) for page, count in _runs(pages)]
        spans: list[tuple[int, int]] = []
        for first in range(0, len(pages), geometry.width):
            for table, start, length in geometry.strips:
                start += pages[first + table] * size
                if spans and sum(spans[-1]) == start:
                    spans[-1] = (spans[-1][0], spans[-1][1] + length)
                else:
                    spans.append((start, length))
        return spans

    def gather(self, blocks: Sequence[int], into: memoryview | DeviceView) -> None:
        group = self._group(blocks)
        rows, copy = self._rows_of(group, blocks), self._as_rows(group, into)
        if self._copies is None:
            torch.index_select(self._rows[group], 0, rows, out=copy)
        else:
            self._settle(self._pages(blocks))
            self._copies.gather(self._rows[group], rows, copy)

    def scatter(self, blocks: Sequence[int], piece: memoryview | DeviceView) -> None:
        group = self._group(blocks)
        rows, copy = self._rows_of(group, blocks), self._as_rows(group, piece)
        if self._copies is None:
            self._rows[group].index_copy_(0, rows, copy)
        else:
            self._settle(self._pages(blocks))
            self._copies.scatter(self._rows[group], rows, copy)

    def _pages(self, blocks: Sequence[int]) -> Collection[int]:
        if self._ratio == 1 and len(self._forms) == 1:
            return blocks
        return {page_of(block, self._ratio) for block in blocks}

    def _as_rows(self, group: int, piece: memoryview | DeviceView) -> Tensor:
        rows = self._rows[group]
        return byte_tensor(piece).view(rows.dtype).view(-1, rows.shape[1])

    def _rows_of(self, group: int, blocks: Sequence[int]) -> Tensor:
        """Return the indices in ``_rows`` of the bytes of these wire blocks, in order."""
        geometry, ratio = self._geometries[group], self._ratio
        per_page, width = geometry.rows_per_page, geometry.width
        places = map(place_of, blocks) if group else blocks
        first = [place // ratio * per_page + place % ratio for place in places]
        pages = torch.tensor(first).view(-1, width)
        if width > 1:
            pages = pages[:, self._page_of_row[group]]
        return (pages + self._rows_of_block[group]).view(-1)

    def _group(self, blocks: Sequence[int]) -> int:
        """Return the group of these wire blocks. Raises ValueError for names that the pool does not have: a
        slice would take one beyond the pool's end for fewer bytes, and a negative one for others."""
        group = group_of(blocks[0]) if blocks else -1
        if 0 <= group < len(self._forms):
            base, width = group << GROUP_SHIFT, self._forms[group].names
            if base <= min(blocks) and max(blocks) < base + self._num_blocks and len(blocks) % width == 0:
                return group
        allowed = f"ids of 0 to {self._num_blocks - 1} are allowed, at least one"
        if len(self._forms) > 1:
            allowed += f", all of one of {len(self._forms)} groups, one for each page of a block"
        raise ValueError(f"wire blocks {list(blocks)}: {allowed}")


def _rows(pool: Tensor, page_bytes: int, row_bytes: int) -> Tensor:
    """Return the pool as rows of so many bytes each, in words as long as they allow: gathering words costs
    less than gathering numbers, and only bytes matter."""
    words = {16: torch.complex128, 8: torch.int64}
    dtype = next((dtype for size, dtype in words.items() if row_bytes % size == 0), torch.uint8)
    rows = pool.view(torch.uint8).view(len(pool) * (page_bytes // row_bytes), row_bytes)
    return rows.view(dtype)


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
