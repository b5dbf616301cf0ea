"""Lightning attention: linear attention whose decay is a constant of each head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers import Linear, RMSNorm
from baton.models.mixer import Mixer
from baton.models.model_step import Narrow, Step
from baton.models.quantization.base import QuantizationScheme, Rows
from baton.models.rope import head_order
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.delta_rule import linear_attention
from baton_kernels.kv_layout import KVPlace
from baton_kernels.rotary import HeadNorm, normed_and_rotated
from baton_kernels.state_pages import LayerStates


class LightningAttention(Mixer):
    """Linear attention of a rank's heads (https://arxiv.org/abs/2401.04658), rotated, with an output that is
    normed by groups of heads and gated; the output is the sum over the heads of all ranks."""

    a_log: Tensor

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
        rotation: int = 0,
    ) -> None:
        """``layer``: the layer's index in the whole model. ``rotation``: the index of its rotation among
        ``Step.rotations``."""
        super().__init__()
        assert config.delta is not None, "a family's config names it"
        shard, sizes = parallel.shard, config.delta
        self.sizes = sizes
        self.collectives: Collectives = parallel.collectives
        self.number = layer
        self.kv = sizes.kept(shard.tp_size)
        self.place = KVPlace(0, 0)
        self.rotation = rotation
        heads, dim = shard.part(sizes.key_heads), sizes.key_dim
        self.heads = len(heads)
        self.groups = max(1, sizes.norm_groups // shard.tp_size)
        order = head_order(config.ropes[layer], dim) or range(dim)
        own = range(heads.start * dim, heads.stop * dim)
        ordered = [head * dim + row for head in heads for row in order]
        size = sizes.key_heads * dim
        qkv = (*ordered, *(size + row for row in ordered), *(2 * size + row for row in own))
        parts: dict[str, Rows] = {"query_key_value": qkv, "g_proj": own}
        self.in_proj = Linear(config.hidden_size, parts, dtype, scheme=scheme, apart=True)
        self.dense = Linear(own, config.hidden_size, dtype, scheme=scheme.within("dense"))
        self.query_layernorm = self.key_layernorm = None
        if config.head_norm is not None:
            self.query_layernorm = RMSNorm(dim, config.norm_eps, dtype, rows=tuple(order))
            self.key_layernorm = RMSNorm(dim, config.norm_eps, dtype, rows=tuple(order))
        self.g_norm = RMSNorm(len(own), config.norm_eps, dtype, rows=own)
        rates = decay_rates(sizes.key_heads, layer, config.num_layers)
        self.register_buffer("a_log", torch.tensor([math.log(rates[h]) for h in heads]), persistent=False)

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        out, gate = self._outputs(x, step)
        if narrow is not None:
            out, gate = out[narrow.rows], gate[narrow.rows]
        weight, eps = self.g_norm.weight, self.g_norm.eps
        grouped = out.view(len(out), self.groups, -1)
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=eps).flatten(1) * weight.float()
        gated = normed * torch.sigmoid(gate.float())
        return self.collectives.sum(self.dense(gated.to(x.dtype)))

    def store(self, x: Tensor, step: Step) -> Tensor:
        return self._outputs(x, step)[0]

    def _outputs(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Takes the states of the step's sequences past its rows; the heads' outputs [T, heads * head_dim]
        float32, and their gates before the sigmoid."""
        assert step.states is not None
        qkv, gate = self.in_proj(x).split_with_sizes([3 * self.dense_inputs, self.dense_inputs], dim=1)
        heads = qkv.float().view(len(x), 3 * self.heads, -1)
        cos, sin = step.rotations[self.rotation]
        q, k, v = normed_and_rotated(heads, self.heads, self.heads, cos, sin, self.head_norm)
        inputs = DeltaInputs(torch.cat((q, k, v), dim=1).flatten(1), None, None, None)
        states = LayerStates(step.states.pages, step.states.group, self.place.index)
        return linear_attention(self.layer, inputs, states, step.states.rows), gate

    @property
    def dense_inputs(self) -> int:
        """Numbers of the outputs of all heads here."""
        return self.heads * self.sizes.value_dim

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm of each head of queries and keys; None: there is none."""
        if self.query_layernorm is None or self.key_layernorm is None:
            return None
        q, k = self.query_layernorm, self.key_layernorm
        return HeadNorm(q.weight.float(), k.weight.float(), q.eps)

    @property
    def layer(self) -> DeltaLayer:
        """The layer as the kernels take it."""
        return DeltaLayer(
            key_heads=self.heads,
            value_heads=self.heads,
            key_dim=self.sizes.key_dim,
            value_dim=self.sizes.value_dim,
            a_log=self.a_log,
            unit_vectors=False,
            query_scale=self.sizes.key_dim**-0.5,
        )


def decay_rates(heads: int, layer: int, layers: int) -> list[float]:
    """The rates of each head: ALiBi's slopes (https://arxiv.org/abs/2108.12409), less in later layers."""
    factor = 1 - (layer - 1) / (layers - 1) + 1e-5
    return [slope * factor for slope in _slopes(heads)]


def _slopes(heads: int) -> list[float]:
    whole = 2 ** int(math.log2(heads))
    base = 2 ** (-8 / whole)
    first = [base ** (head + 1) for head in range(whole)]
    return first if whole == heads else [*first, *_slopes(2 * whole)[::2][: heads - whole]]
