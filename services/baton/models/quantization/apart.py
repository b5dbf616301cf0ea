"""Projections of the same input that are kept in different ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from baton.models.quantization.base import LinearWeights, Multiplier, Place


class MultipliersApart:
    """Multiplies with one after the other."""

    def __init__(self, multipliers: Sequence[Multiplier]) -> None:
        self._multipliers = tuple(multipliers)

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """See ``Multiplier``: the outputs of all, one behind the other."""
        return torch.cat([each.multiply(x, out_dtype) for each in self._multipliers], dim=-1)


class WeightsApart(LinearWeights):
    """The weights of some projections, and of those that follow them."""

    def __init__(self, weights: Sequence[LinearWeights]) -> None:
        self._weights = tuple(weights)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {
            f"{name}_{number}": parameter
            for number, each in enumerate(self._weights)
            for name, parameter in each.parameters.items()
        }

    def places(self) -> Mapping[str, Mapping[str, Place]]:
        return {name: places for each in self._weights for name, places in each.places().items()}

    def plain(self) -> Tensor:
        return torch.cat([each.plain() for each in self._weights])

    def pack(self) -> Multiplier:
        packed = [each.pack() for each in self._weights]
        if all(one is each for one, each in zip(packed, self._weights, strict=True)):
            return self
        return MultipliersApart(packed)

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return MultipliersApart(self._weights).multiply(x, out_dtype)
