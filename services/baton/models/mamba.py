"""Mamba-2 layers."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.channels import CausalConv
from baton.models.config import ModelConfig
from baton.models.layers import Linear
from baton.models.mixer import Mixer
from baton.models.mixer_config import MambaConfig
from baton.models.model_step import Narrow, Step
from baton.models.quantization.base import Index, Place, QuantizationScheme, Rows, empty_parameter
from baton.parallel.collectives import Collectives, Parallel
from baton.parallel.shard import Shard, split
from baton_kernels.kv_layout import KVPlace
from baton_kernels.mamba import gated_norm, gated_squares, mamba
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.mamba_weights import GatedNorm, MambaWeights
from baton_kernels.state_pages import LayerStates


class Mamba2(Mixer):
    """A selective state space (see ``baton_kernels.mamba``) of a rank's heads, between two projections; the
    output is the sum over the heads of all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
    ) -> None:
        super().__init__()
        assert config.mamba is not None, "a family's config names it"
        own, shard = config.mamba, parallel.shard
        self.own, self.shard = own, shard
        self.collectives: Collectives = parallel.collectives
        self.number = layer
        self.kv = config.kept_by("mamba", layer, shard.tp_size)
        self.place = KVPlace(0, layer - shard.layers.start)
        self.sizes = sizes = own.sizes(shard.tp_size)
        self._dtype, self._eps = dtype, config.norm_eps
        hidden, numbers = config.hidden_size, torch.float32
        heads, groups = _here(own, shard)
        inner = range(heads.start * own.head_dim, heads.stop * own.head_dim)
        rows = _projected_rows(own, heads, groups)
        self.in_proj = Linear(hidden, rows, dtype, bias=own.in_bias, scheme=scheme.within("in_proj"))
        channels = _channels(own, sizes, heads, groups)
        all_channels = own.heads * own.head_dim + 2 * own.groups * own.state_dim
        self.conv1d = CausalConv(channels, all_channels, own.conv_kernel, bias=own.conv_bias)
        self.a_log, self.d, self.dt_bias = (empty_parameter(len(heads), dtype=numbers) for _ in range(3))
        self.norm_weight = empty_parameter(len(inner), dtype=numbers) if own.norm else None
        out_bias = own.out_bias and shard.tp_rank == 0
        self.out_proj = Linear(inner, hidden, dtype, bias=out_bias, scheme=scheme.within("out_proj"))
        self._heads, self._inner = slice(heads.start, heads.stop), slice(inner.start, inner.stop)
        self._factors = _factors(own, sizes)

    def places(self) -> dict[str, Place]:
        """The places of the parameters that are no projection's and no convolution's."""
        heads: tuple[Index, ...] = (self._heads,)
        found = {
            "A_log": Place(self.a_log, heads),
            "D": Place(self.d, heads),
            "dt_bias": Place(self.dt_bias, heads),
        }
        if self.norm_weight is not None:
            found["norm.weight"] = Place(self.norm_weight, (self._inner,))
        return found

    def store(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Leaves the states; returns what the rows read from them, float32, and what gates it."""
        assert step.states is not None
        states = LayerStates(step.states.pages, step.states.group, self.place.index)
        # The kernels of CUDA take any type, and CPUs the sums as they are.
        projected = self.in_proj.multiplier.multiply(x, None if x.is_cuda else torch.float32)
        if self._factors is not None:
            projected.mul_(self._factors)
        limits = self.own.dt_limits
        weights = MambaWeights(self.conv1d.weights, self.a_log, self.d, self.dt_bias, limits)
        y = mamba(projected, weights, self.sizes, states, step.states.rows)
        return y, projected[:, : self.sizes.inner]

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        y, gate = self.store(x, step)
        if narrow is not None:
            y, gate = y[narrow.rows], gate[narrow.rows]
        own = self.own
        size = own.heads * own.head_dim // own.groups
        norm = GatedNorm(self.norm_weight, self._eps, self.sizes.groups, size, own.gate_first)
        squares = None
        if own.norm and self.shard.tp_size > own.groups:
            squares = self._squares_of_ranks(gated_squares(y, gate, norm))
        return self.collectives.sum(self.out_proj(gated_norm(y, gate, norm, self._dtype, squares)))

    def _squares_of_ranks(self, squares: Tensor) -> Tensor:
        """squares [T, 1] of the part of a group that is here -> those of all its ranks."""
        group = self.shard.tp_rank * self.own.groups // self.shard.tp_size
        of_groups = squares.new_zeros((len(squares), self.own.groups))
        of_groups[:, group] = squares[:, 0]
        return self.collectives.sum(of_groups)[:, group : group + 1]


def _here(own: MambaConfig, shard: Shard) -> tuple[range, range]:
    """The heads of a rank, and the groups that they are of."""
    heads = split(own.heads, shard.tp_size, shard.tp_rank)
    if shard.tp_size <= own.groups:
        return heads, split(own.groups, shard.tp_size, shard.tp_rank)
    group = shard.tp_rank * own.groups // shard.tp_size
    return heads, range(group, group + 1)


def _projected_rows(own: MambaConfig, heads: range, groups: range) -> Rows:
    """The rows of z, x, B, C and dt in the checkpoint's projection."""
    inner, of_groups = own.heads * own.head_dim, own.groups * own.state_dim
    if len(heads) == own.heads:
        return range(2 * inner + 2 * of_groups + own.heads)
    starts, rows = (0, inner), list[int]()
    for start in starts:
        rows += range(start + heads.start * own.head_dim, start + heads.stop * own.head_dim)
    for start in (2 * inner, 2 * inner + of_groups):
        rows += range(start + groups.start * own.state_dim, start + groups.stop * own.state_dim)
    last = 2 * inner + 2 * of_groups
    return (*rows, *range(last + heads.start, last + heads.stop))


def _channels(own: MambaConfig, sizes: MambaSizes, heads: range, groups: range) -> Rows:
    """The channels of the checkpoint's convolution, unit by unit: x, B and C."""
    inner, found = own.heads * own.head_dim, list[int]()
    of_x, of_group, _ = sizes.channels
    for unit in range(sizes.units):
        first = heads.start * own.head_dim + unit * of_x
        found += range(first, first + of_x)
        group = inner + (groups.start + sizes.first_group(unit)) * own.state_dim
        for start in (group, group + own.groups * own.state_dim):
            found += range(start, start + of_group)
    return tuple(found)


def _factors(own: MambaConfig, sizes: MambaSizes) -> Tensor | None:
    """The factor of each projected number; None: all are 1."""
    if set(own.factors) == {1.0}:
        return None
    of_groups, heads = sizes.groups * sizes.state_dim, sizes.units * sizes.heads
    counts = (sizes.inner, sizes.inner, of_groups, of_groups, heads)
    return torch.cat([torch.full((n,), f) for n, f in zip(counts, own.factors, strict=True)])
