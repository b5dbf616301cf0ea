"""The gated short convolution of LFM2 (https://arxiv.org/abs/2511.23404)."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.channels import CausalConv
from baton.models.config import ModelConfig
from baton.models.layers import Linear
from baton.models.mixer import Mixer
from baton.models.model_step import Narrow, Step
from baton.models.quantization.base import QuantizationScheme
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.causal_conv import short_conv
from baton_kernels.kv_layout import KVPlace
from baton_kernels.state_pages import LayerStates


class ShortConv(Mixer):
    """out(C * conv(B * x)) of a rank's channels, where B, C and x are projections of a token; the output is
    the sum over the channels of all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
    ) -> None:
        super().__init__()
        assert config.conv is not None, "a family's config names it"
        own, shard = config.conv, parallel.shard
        self.collectives: Collectives = parallel.collectives
        self.number = layer
        self.kv = config.kept_by("conv", layer, shard.tp_size)
        self.place = KVPlace(0, layer - shard.layers.start)
        size, here = own.channels, shard.part(own.channels)
        rows = (*here, *(size + row for row in here), *(2 * size + row for row in here))
        hidden, bias = config.hidden_size, own.bias
        self.in_proj = Linear(hidden, rows, dtype, bias=bias, scheme=scheme.within("in_proj"))
        self.conv = CausalConv(here, size, own.conv_kernel, bias=bias)
        self.out_proj = Linear(
            here, hidden, dtype, bias=bias and shard.tp_rank == 0, scheme=scheme.within("out_proj")
        )

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Leaves the states; returns what the rows yield in front of the last projection."""
        assert step.states is not None
        states = LayerStates(step.states.pages, step.states.group, self.place.index)
        # The kernels of CUDA take any type, and CPUs the sums as they are.
        projected = self.in_proj.multiplier.multiply(x, None if x.is_cuda else torch.float32)
        return short_conv(projected, self.conv.weights, states, step.states.rows)

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        y = self.store(x, step)
        if narrow is not None:
            y = y[narrow.rows]
        return self.collectives.sum(self.out_proj(y.to(x.dtype)))
