"""The weights of causal convolutions, as their kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.models.quantization.base import Place, Rows, empty_parameter, index_of
from baton_kernels.causal_conv import ConvWeights


@dataclass(frozen=True, slots=True)
class ChannelsPlace(Place):
    """Memory for some channels, of which one may be there more than once."""

    whole: torch.Size
    """The shape of the checkpoint's tensor."""

    @property
    def shape(self) -> torch.Size:
        return self.whole

    def direct(self, shape: torch.Size) -> None:
        return None


class CausalConv(nn.Module):
    """Causal convolutions of these channels out of ``all_channels``, in float32."""

    def __init__(self, channels: Rows, all_channels: int, kernel: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(kernel, len(channels), dtype=torch.float32)
        self.bias = empty_parameter(len(channels), dtype=torch.float32) if bias else None
        self._source = index_of(channels)
        self._all = all_channels

    def places(self) -> dict[str, Place]:
        """The places of the weights: the checkpoint has them as [channels, 1, kernel]."""
        every, kernel = slice(None), len(self.weight)
        weight, whole = self.weight.T[:, None], torch.Size((self._all, 1, kernel))
        found: dict[str, Place] = {"weight": ChannelsPlace(weight, (self._source, every, every), whole)}
        if self.bias is not None:
            found["bias"] = ChannelsPlace(self.bias, (self._source,), torch.Size((self._all,)))
        return found

    @property
    def weights(self) -> ConvWeights:
        """The weights, for kernels."""
        bias: Tensor | None = self.bias
        return ConvWeights(self.weight, bias)
