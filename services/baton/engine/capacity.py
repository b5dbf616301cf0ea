"""Whether a device's memory, or a machine's, holds a checkpoint, and the KV of how many sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.kv.page_counts import PageCounts
from baton.engine.rank_start import checked_blocks
from baton.engine.startup import CPU_KV_BYTES
from baton.models.inspection import Inspection
from baton.models.loader import kv_layout
from baton_kernels.kv_layout import KVGroup, KVKind, KVLayout, StateKV
from baton_kernels.window import ChunkedWindow


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that a worker's ranks may use."""

    num_bytes: int
    fraction: float = 1.0
    """The share of it that a worker uses."""
    is_shared: bool = False
    """Whether all ranks use it together: they run on CPUs. Otherwise each has as much."""
    kv_bytes: int | None = None
    """The bytes of the KV pool on all ranks; None: what is left of devices, or a CPU's default."""

    @property
    def usable(self) -> int:
        return int(self.num_bytes * self.fraction)


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """What a group of layers keeps on a rank."""

    kind: KVKind
    num_layers: int
    window: int | None
    """Tokens, the last ones, of which it is kept; None: all."""
    num_bytes: int
    """The bytes of a token or, of states, of a sequence."""

    @classmethod
    def of(cls, layout: KVLayout, group: KVGroup) -> KeptBytes:
        """What the layout has for a group."""
        kept, number = layout.kept_bytes(group), len(group.layers)
        if isinstance(group.kv, StateKV):
            return cls(group.kind, number, None, kept)
        window = group.kv.window
        size = window.size if isinstance(window, ChunkedWindow) else window
        return cls(group.kind, number, size, kept // layout.block_size)


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The KV cache of a checkpoint's ranks beside its weights. Steps take memory besides on devices, which is
    measured when a worker starts."""

    layouts: tuple[KVLayout, ...]
    """The layout of each rank's pool."""
    length: int
    """Tokens of the sequences that are counted."""
    sequence_pages: int
    """The pages that such a sequence may hold at once, on each rank."""
    num_pages: int
    """The pages of the pool; 0: the weights leave no room for it."""
    longest: int
    """The tokens of the longest sequence that the pool holds."""

    @property
    def num_sequences(self) -> int:
        """Sequences of the length that the pool holds at once."""
        return self.num_pages // self.sequence_pages

    @property
    def pool_bytes(self) -> int:
        """The bytes of the pools of all ranks."""
        return self.num_pages * sum(layout.page_bytes for layout in self.layouts)

    def kept(self, rank: int) -> tuple[KeptBytes, ...]:
        """What each group of layers keeps on a rank."""
        layout = self.layouts[rank]
        return tuple(KeptBytes.of(layout, group) for group in layout.groups)

    def sequence_bytes(self, rank: int) -> int:
        """The bytes that such a sequence may hold at once on a rank."""
        return self.sequence_pages * self.layouts[rank].page_bytes


def capacity_of(
    inspection: Inspection,
    memory: DeviceMemory,
    block_size: int,
    length: int,
    dtype: torch.dtype | None = None,
    scale_bytes: int = 0,
) -> KVCapacity:
    """The KV cache that ``memory`` has room for, in blocks of ``block_size`` tokens, and its sequences of
    ``length`` tokens. ``dtype``: the type of KV; None: the model's. ``scale_bytes``: see ``KVLayout``.
    ModelError if the blocks do not suit the model."""
    config, ranks = inspection.config, inspection.ranks
    dtype = dtype or inspection.dtype
    layouts = tuple(kv_layout(config, block_size, dtype, rank.shard, scale_bytes) for rank in ranks)
    counts = PageCounts(layouts[0], block_size)
    num_pages = _pages(inspection, memory, [layout.page_bytes for layout in layouts])
    return KVCapacity(
        layouts,
        length,
        counts.of(length),
        num_pages,
        counts.most_tokens(num_pages, config.max_model_len),
    )


def _pages(inspection: Inspection, memory: DeviceMemory, page_bytes: list[int]) -> int:
    """The pages of the pool that fits beside the weights; 0: none does."""
    weights, sizes, wanted = [rank.num_bytes for rank in inspection.ranks], page_bytes, memory.kv_bytes
    if memory.is_shared:
        weights, sizes = [sum(weights)], [sum(sizes)]
        wanted = CPU_KV_BYTES if wanted is None else wanted
    try:
        fits = min(
            checked_blocks(memory.usable - taken, size) for taken, size in zip(weights, sizes, strict=True)
        )
        pages = fits if wanted is None else checked_blocks(wanted, sum(page_bytes))
    except ValueError:
        return 0
    return pages if pages <= fits else 0
