"""Norms over rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, or a layer norm, over the last dimension."""

    weight: Tensor
    eps: float
    offset: float = 0.0
    """A number added to the weight (Gemma: 1)."""
    centered: bool = False
    """Whether the mean is subtracted first: a layer norm."""
    bias: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """The norm of x [..., size], by plain torch, computed in float32 and left so."""
        x, weight = x.float(), self.weight.float() + self.offset
        if not self.centered:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)
