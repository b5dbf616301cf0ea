"""The scales of an attention layer's K and V that checkpoints carry for an FP8 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.quantization.base import FactorPlace, Place


class KVScalePlace(FactorPlace):
    """Memory of one scale, or of the same one of K and V."""

    @property
    def is_optional(self) -> bool:
        return True

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    def fits(self, shape: torch.Size, expected: torch.Size) -> bool:
        return shape.numel() == 1

    def load(self, found: Tensor) -> None:
        scale = float(found)
        if not 0 < scale < float("inf"):
            raise ValueError(f"the scale is {scale:g}; allowed: a finite number above 0")
        self.tensor.fill_(scale)

    def direct(self, shape: torch.Size) -> None:
        return None  # what is loaded is checked


def kv_scale_places(scales: Tensor) -> dict[str, Place]:
    """The places of ``scales`` [2] of a layer's K and V, by their names in the checkpoint, relative to the
    layer's attention. kv_scale, in old checkpoints, is one scale of both."""
    parts = {"k_scale": scales[0], "v_scale": scales[1], "kv_scale": scales}
    return {name: KVScalePlace(part, ()) for name, part in parts.items()}
