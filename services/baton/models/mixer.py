"""The interface of what layers mix tokens by."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from baton.models.model_step import Narrow, Step
from baton.models.quantization.base import Place
from baton_kernels.kv_layout import KVPlace, LayerKV


class Mixer(nn.Module):
    """What a layer mixes tokens by, of one rank; the output is the sum over all ranks."""

    number: int
    """The layer's index in the whole model."""
    kv: LayerKV
    """What it keeps in the pool."""
    place: KVPlace
    """The place of that, set by ``lay_out``."""

    def lay_out(self, place: KVPlace, has_layer_scales: bool) -> None:
        """Have what is kept at this place of a pool from now on. ``has_layer_scales``: whether K and V are
        FP8 by scales of the layer."""
        self.place = place

    @abstractmethod
    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        """x [T, hidden] -> [T, hidden], or [R, hidden] of the rows that ``narrow`` names. What the rows keep
        goes to the pool."""

    @abstractmethod
    def store(self, x: Tensor, step: Step) -> object:
        """Leave what the rows keep in the pool, where no row's output is needed."""

    def pack(self) -> None:
        """Lay out weights of its own, which are no module's, once they are loaded."""


@runtime_checkable
class PlacesItself(Protocol):
    """A module that says itself what its parameters are in the checkpoint; modules in it are left to
    themselves."""

    def places(self) -> dict[str, Place]:
        """The places of its own parameters, by their names in the checkpoint, relative to the module's."""
