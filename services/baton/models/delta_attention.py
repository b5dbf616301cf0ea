"""Linear attention by the delta rule: gated delta nets, Kimi delta attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers import Linear
from baton.models.mixer import Mixer
from baton.models.mixer_config import DeltaConfig
from baton.models.model_step import Narrow, Step
from baton.models.quantization.base import (
    FactorPlace,
    Place,
    QuantizationScheme,
    Rows,
    empty_parameter,
    index_of,
)
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.delta_rule import linear_attention
from baton_kernels.kv_layout import KVPlace
from baton_kernels.state_pages import LayerStates


class DeltaAttention(Mixer):
    """Linear attention of a rank's key heads and their value heads, with a state for each value head; the
    output is the sum over the heads of all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
    ) -> None:
        """``layer``: the layer's index in the whole model."""
        super().__init__()
        assert config.delta is not None, "a family's config names it"
        self.sizes = sizes = config.delta
        shard = parallel.shard
        self.collectives: Collectives = parallel.collectives
        self.number = layer
        self.kv = sizes.kept(shard.tp_size)
        self.place = KVPlace(0, 0)
        self.heads = heads = DeltaHeads(sizes, shard.part(sizes.key_heads))
        parts = heads.projections()
        self.in_proj = Linear(config.hidden_size, parts, dtype, scheme=scheme, apart=True)
        self.decay_proj = self.gate_proj = None
        if sizes.low_rank is not None:
            decays, gates = heads.decay_rows, heads.value_rows
            self.decay_proj = Linear(sizes.low_rank, {"f_b_proj": decays}, dtype, scheme=scheme)
            self.gate_proj = Linear(sizes.low_rank, {"g_b_proj": gates}, dtype, scheme=scheme)
        name = "o_proj" if sizes.names == "separate" else "out_proj"
        outputs = {name: range(config.hidden_size)}
        self.out_proj = Linear(heads.value_rows, outputs, dtype, scheme=scheme)
        # Small weights are float32 in whatever type the model is: their products are.
        channels = 2 * len(heads.key_rows) + len(heads.value_rows)
        self.conv = empty_parameter(sizes.conv_kernel, channels, dtype=torch.float32)
        self.a_log = empty_parameter(len(heads.values), dtype=torch.float32)
        self.dt_bias = empty_parameter(len(heads.decay_rows), dtype=torch.float32)
        self.norm = empty_parameter(sizes.value_dim, dtype=torch.float32)
        self._eps = config.norm_eps

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        out = self.store(x, step)
        if narrow is not None:
            out = out[narrow.rows]
        return self.collectives.sum(self.out_proj(out))

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Takes the states of the step's sequences past its rows; returns the heads' outputs [T, value_heads
        * value_dim]."""
        assert step.states is not None
        states = LayerStates(step.states.pages, step.states.group, self.place.index)
        return linear_attention(self.layer, self._inputs(x), states, step.states.rows)

    def _inputs(self, x: Tensor) -> DeltaInputs:
        heads = self.heads
        gates, decays = len(heads.value_rows), len(heads.decay_rows)
        if self.sizes.low_rank is not None:
            gates = decays = self.sizes.low_rank
        sizes = [self.conv.shape[1], gates, decays, len(heads.values)]
        qkv, gate, decay, beta = self.in_proj(x).split_with_sizes(sizes, dim=1)
        if self.decay_proj is not None and self.gate_proj is not None:
            gate, decay = self.gate_proj(gate), self.decay_proj(decay)
        return DeltaInputs(qkv, decay, beta, gate)

    @property
    def layer(self) -> DeltaLayer:
        """The layer as the kernels take it."""
        sizes = self.sizes
        return DeltaLayer(
            key_heads=len(self.heads.keys),
            value_heads=len(self.heads.values),
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            lower_bound=sizes.lower_bound,
            conv=self.conv,
            query_scale=sizes.key_dim**-0.5,
            norm=self.norm,
            eps=self._eps,
            gate=sizes.gate,
        )

    def places(self) -> dict[str, Place]:
        """The places of its own parameters, by their names in the checkpoint, relative to the module's."""
        separate = self.sizes.names == "separate"
        heads, every = index_of((*self.heads.values,)), slice(None)
        rates = Place(self.a_log, (heads,))
        if not self.sizes.flat_rates:
            rates = Place(self.a_log[None, None, :, None], (every, every, heads, every))
        return {
            **dict(self._conv_places()),
            "A_log": rates,
            "dt_bias": Place(self.dt_bias, (index_of(self.heads.decay_rows),)),
            "o_norm.weight" if separate else "norm.weight": FactorPlace(self.norm, (every,)),
        }

    def _conv_places(self) -> Iterator[tuple[str, Place]]:
        """The checkpoint's convolutions are [channels, 1, kernel], those of queries, keys and values apart or
        not."""
        heads, every = self.heads, slice(None)
        parts = {"conv1d.weight": heads.qkv_rows}
        if self.sizes.names == "separate":
            rows = heads.key_rows, heads.key_rows, heads.value_rows
            parts = {f"{name}_conv1d.weight": part for name, part in zip("qkv", rows, strict=True)}
        start = 0
        for name, part in parts.items():
            memory = self.conv[:, start : start + len(part)].T.unsqueeze(1)
            yield name, Place(memory, (index_of(part), every, every))
            start += len(part)


class DeltaHeads:
    """A rank's heads, and their rows in the checkpoint."""

    def __init__(self, sizes: DeltaConfig, keys: range) -> None:
        """``keys``: the rank's key heads."""
        shared = sizes.value_heads // sizes.key_heads
        self.sizes = sizes
        self.keys = keys
        self.values = range(keys.start * shared, keys.stop * shared)
        self.key_rows = _of_heads(keys, sizes.key_dim)
        self.value_rows = _of_heads(self.values, sizes.value_dim)
        self.decay_rows = _of_heads(self.values, sizes.key_dim if sizes.kind == "kda" else 1)

    @property
    def qkv_rows(self) -> Rows:
        """The rows among those of all queries, then all keys, then all values."""
        keys = self.sizes.key_heads * self.sizes.key_dim
        behind = (keys + row for row in self.key_rows)
        return (*self.key_rows, *behind, *(2 * keys + row for row in self.value_rows))

    def projections(self) -> dict[str, Rows]:
        """The rows of each projection, in an order in which queries, keys and values, gates, decays and betas
        follow each other."""
        match self.sizes.names:
            case "grouped":
                return self._grouped()
            case "joined":
                values = self.values
                return {
                    "in_proj_qkv": self.qkv_rows,
                    "in_proj_z": self.value_rows,
                    "in_proj_a": values,
                    "in_proj_b": values,
                }
            case "separate":
                return self._separate()

    def _separate(self) -> dict[str, Rows]:
        rank = self.sizes.low_rank
        gates: dict[str, Rows] = {"g_proj": self.value_rows, "f_proj": self.decay_rows}
        if rank is not None:
            gates = {"g_a_proj": range(rank), "f_a_proj": range(rank)}
        queries: dict[str, Rows] = {"q_proj": self.key_rows, "k_proj": self.key_rows}
        return {**queries, "v_proj": self.value_rows, **gates, "b_proj": self.values}

    def _grouped(self) -> dict[str, Rows]:
        """The checkpoint has, key head by key head, the rows of query, key, values and gates, and those of
        betas and decays."""
        key, shared = self.sizes.key_dim, self.sizes.value_heads // self.sizes.key_heads
        values = shared * self.sizes.value_dim
        q, k = range(key), range(key, 2 * key)
        v = range(2 * key, 2 * key + values)
        z = range(2 * key + values, 2 * key + 2 * values)
        of_head = 2 * key + 2 * values
        beta, decay = range(shared), range(shared, 2 * shared)
        return {
            "in_proj_qkvz": tuple(row for part in (q, k, v, z) for row in self._each(part, of_head)),
            "in_proj_ba": tuple(row for part in (decay, beta) for row in self._each(part, 2 * shared)),
        }

    def _each(self, part: range, of_head: int) -> Iterator[int]:
        """The rows ``part`` of each key head, where a head has ``of_head`` rows."""
        return (head * of_head + row for head in self.keys for row in part)


def _of_heads(heads: range, dim: int) -> range:
    """The rows of the heads ``heads``, of ``dim`` rows each."""
    return range(heads.start * dim, heads.stop * dim)
