"""KV blocks that arrive in another type than their pool's, and are converted in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.transport.base import BlockForm, DeviceView, PageMemory
from baton.transport.block_names import group_of
from baton.transport.device_copies import DeviceCopies
from baton.transport.piece_bytes import byte_tensor
from baton.transport.staging import pieces
from baton_kernels.kv_fp8 import KVConversion

AT_ONCE_BYTES = 1 << 20
"""The bytes that are converted at a time, unless one block is larger. What comes of them takes at most four
times as much, beside the piece in staging memory."""


@dataclass(frozen=True, slots=True)
class GroupConversion:
    """A KV group whose blocks arrive in another type."""

    shape: tuple[int, ...]
    """Heads, layers, vectors, tokens and numbers of a vector of a wire block."""
    convert: KVConversion


class ConvertedPart:
    """``baton.transport.base.PageMemory`` over a part of a pool, for one end of a link: blocks arrive in
    another type than the pool's. All of them pass through staging memory, in the sender's type."""

    def __init__(
        self, part: PageMemory, groups: Sequence[GroupConversion | None], copies: DeviceCopies | None
    ) -> None:
        """``part``: the same part, in the pool's type. ``groups``: of the part; None for a group that has one
        type wherever it is. ``copies``: of a pool on a device."""
        self._part = part
        self._groups = tuple(groups)
        self._copies = copies

    def form_of(self, blocks: Sequence[int]) -> BlockForm:
        form = self._part.form_of(blocks)
        group = self._groups[group_of(blocks[0])]
        return form if group is None else BlockForm(form.names, _bytes_of(group))

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        return []

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        return []

    def whole(self) -> None:
        return None

    def gather(self, blocks: Sequence[int], into: memoryview | DeviceView) -> None:
        """Raise ValueError: the bytes that came are nowhere any more."""
        raise ValueError(f"wire blocks {list(blocks)}: they were converted when they arrived")

    def scatter(self, blocks: Sequence[int], piece: memoryview | DeviceView) -> None:
        group = self._groups[group_of(blocks[0])]
        if group is None:
            self._part.scatter(blocks, piece)
            return
        form, done = self.form_of(blocks), 0
        for some in pieces(blocks, form.nbytes, AT_ONCE_BYTES, form.names):
            size = form.size_of(some)
            arrived = byte_tensor(piece[done : done + size]).view(group.convert.source)
            self._part.scatter(some, self._converted(arrived.view(-1, *group.shape), group.convert))
            done += size

    def _converted(self, arrived: Tensor, convert: KVConversion) -> memoryview | DeviceView:
        """Return the blocks as the pool has them. Of a pool on a device they are converted there, beside the
        kernels that compute."""
        copies = self._copies
        if copies is None:
            data: memoryview = _flat(convert(arrived)).numpy().data
            return data
        made = copies.compute(lambda: _flat(convert(arrived.to(copies.device, non_blocking=True))))
        return DeviceView(copies.index, made.data_ptr(), made.nbytes, made)


def _flat(blocks: Tensor) -> Tensor:
    return blocks.view(torch.uint8).view(-1)


def _bytes_of(group: GroupConversion) -> int:
    return torch.Size(group.shape).numel() * group.convert.source.itemsize
