"""The states of layers in the pages of a pool: see ``baton_kernels.kv_layout``.

A state is a *cell* of float32 numbers for each unit of each layer. Pages in front of a run of tokens are its
*sources*, pages behind it its *targets*; a negative source is a state of zeros, a negative target is nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.kv_layout import KVGroup, StateKV


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer, of all sequences."""

    pages: Tensor
    """[num_pages, numbers] float32: the whole pool."""
    group: KVGroup
    """The group of the layers that keep a state."""
    layer: int
    """The layer's index in the group: ``KVPlace.index``."""

    @property
    def kv(self) -> StateKV:
        assert isinstance(self.group.kv, StateKV)
        return self.group.kv

    def offsets(self, tables: Tensor) -> Tensor:
        """tables [n, pages of a state] int64 -> [n, units] int64: the number of ``pages``, seen as one row,
        at which each unit's cell begins; negative where the table is."""
        units, size = self.kv.units, self.kv.size
        first = self.layer * units
        cells = torch.arange(first, first + units, device=tables.device)
        page = tables[:, cells // self.group.per_page]
        return torch.where(page < 0, -1, page * self.pages.stride(0) + cells % self.group.per_page * size)

    def read(self, sources: Tensor) -> Tensor:
        """sources [n, pages of a state] int64 -> [n, units, size] float32, a copy."""
        return self._cells[self._indices(sources)].masked_fill_((sources[:, :1] < 0)[..., None], 0)

    def write(self, targets: Tensor, states: Tensor) -> None:
        """Puts states [n, units, size] where targets [n, pages of a state] int64 name pages."""
        named = targets[:, 0] >= 0
        self._cells[self._indices(targets[named])] = states[named]

    @property
    def _cells(self) -> Tensor:
        """The pool as [num_pages, cells of a page, size]."""
        size, count = self.kv.size, self.group.per_page
        return self.pages[:, : count * size].view(len(self.pages), count, size)

    def _indices(self, tables: Tensor) -> tuple[Tensor, Tensor]:
        """The pages of each table's units, [n, units], page 0 for none, and the cells there, [units]."""
        first = self.layer * self.kv.units
        cells = torch.arange(first, first + self.kv.units, device=tables.device)
        return tables[:, cells // self.group.per_page].clamp(min=0), cells % self.group.per_page
