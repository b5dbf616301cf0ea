"""Layers of linear attention with random weights, inputs and states in pages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.kv_layout import KVGroup, StateKV
from baton_kernels.paged import StateRows, StateSegment
from baton_kernels.state_pages import LayerStates


def delta_layer(
    key_heads: int, shared: int, key_dim: int, value_dim: int, *, taps: int = 3, by_channel: bool = False
) -> DeltaLayer:
    """Return a gated delta net's or, with ``by_channel``, a Kimi delta attention's layer."""
    heads = key_heads * shared
    channels = 2 * key_heads * key_dim + heads * value_dim
    return DeltaLayer(
        key_heads=key_heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        a_log=torch.rand(heads) * 2 - 1,
        dt_bias=torch.randn(heads * (key_dim if by_channel else 1)) - 1,
        conv=torch.randn(taps + 1, channels) * 0.5 if taps else None,
        query_scale=key_dim**-0.5,
        norm=torch.rand(value_dim) + 0.5,
        eps=1e-6,
        gate="sigmoid" if by_channel else "silu",
    )


def _layers() -> Mapping[str, tuple[DeltaLayer, bool, bool]]:
    """Name -> layer, whether decays are of channels, whether there is a delta rule."""
    torch.manual_seed(0)
    lightning = delta_layer(3, 1, 32, 32, taps=0)
    lightning = replace(lightning, unit_vectors=False, dt_bias=None, gate="sigmoid")
    kda = delta_layer(2, 1, 32, 32, by_channel=True)
    return {
        "gdn": (delta_layer(2, 2, 32, 64), False, True),
        "gdn-odd": (delta_layer(3, 1, 10, 12, taps=1), False, True),
        "gdn-wide": (delta_layer(1, 3, 16, 32), False, True),
        "kda": (kda, True, True),
        "kda-bounded": (replace(kda, lower_bound=-5.0), True, True),
        "kda-odd": (delta_layer(2, 1, 6, 8, by_channel=True), True, True),
        "lightning": (lightning, False, False),
        "bare": (replace(lightning, norm=None), False, False),
    }


LAYERS = MappingProxyType(_layers())


def layer_inputs(
    layer: DeltaLayer, tokens: int, dtype: torch.dtype, *, by_channel: bool, corrects: bool
) -> DeltaInputs:
    """Return inputs of a layer, whose rows lie apart. ``corrects``: whether there is a delta rule, and a
    decay of each token."""
    heads = layer.value_heads
    sizes = {
        "qkv": layer.key_heads * layer.unit_channels,
        "decay": heads * (layer.key_dim if by_channel else 1),
        "beta": heads,
        "gate": heads * layer.value_dim,
    }
    parts = torch.randn(tokens, sum(sizes.values())).to(dtype).split_with_sizes(list(sizes.values()), dim=1)
    inputs = DeltaInputs(**dict(zip(sizes, parts, strict=True)))
    return inputs if corrects else replace(inputs, decay=None, beta=None)


def random_inputs(name: str, tokens: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    """Return inputs of a layer of ``LAYERS``."""
    layer, by_channel, corrects = LAYERS[name]
    inputs = layer_inputs(layer, tokens, dtype, by_channel=by_channel, corrects=corrects)
    return inputs if name != "bare" else replace(inputs, gate=None)


@dataclass
class PagedStates:
    """Pages with states of the middle one of three layers. Pages that are not given out are NaN."""

    states: LayerStates
    free: list[int]

    @classmethod
    def of(cls, layer: DeltaLayer, num_states: int = 60, per_page: int = 2) -> PagedStates:
        """Return pages for as many states, with as many cells in each page."""
        size = layer.shared * layer.key_dim * layer.value_dim + layer.taps * layer.unit_channels
        kv = StateKV(layer.key_heads, size)
        count = -(-3 * layer.key_heads // per_page)
        group = KVGroup(kv, (0, 1, 2), range(1, 1 + count), per_page)
        pages = torch.full((num_states * count + 1, per_page * size + 5), float("nan"))
        free = list(range(1, len(pages)))
        random.Random(0).shuffle(free)
        return cls(LayerStates(pages, group, 1), free)

    def table(self) -> Tensor:
        """Return the pages of a new state."""
        return torch.tensor([self.free.pop() for _ in self.states.group.tables])

    @property
    def none(self) -> Tensor:
        """The table of a state of zeros as a source, of nowhere as a target."""
        return torch.full((len(self.states.group.tables),), -1)

    def rows(
        self,
        decode: Sequence[tuple[Tensor, Sequence[Tensor]]],
        segments: Sequence[tuple[int, Tensor, Tensor]] = (),
    ) -> StateRows:
        """Return the rows of sequences with a source and the targets of their rows, then segments of a
        length, a source and a target."""
        width = len(self.states.group.tables)
        start = sum(len(targets) for _, targets in decode)
        made: list[StateSegment] = []
        for length, source, target in segments:
            made.append(StateSegment(start, length, source, target))
            start += length
        return StateRows(
            torch.stack([s for s, _ in decode]) if decode else torch.zeros((0, width), dtype=torch.int64),
            torch.stack([t for _, each in decode for t in each])
            if decode
            else torch.zeros((0, width), dtype=torch.int64),
            tuple(made),
        )
