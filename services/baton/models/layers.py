"""The layers that model families share. Activations are [T, ...]: all tokens of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.quantization.base import (
    Index,
    LinearShape,
    LinearWeights,
    Multiplier,
    QuantizationScheme,
    Rows,
    empty_parameter,
    index_of,
)
from baton.models.quantization.plain import PLAIN
from baton.models.rope import head_order
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.activation_kind import SILU, Activation
from baton_kernels.attention import AttentionPlan, paged_attention, rotate_and_store
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.norm import Norm
from baton_kernels.rotary import HeadNorm, WholeNorm
from baton_kernels.rows import norm_heads, scale_heads, squares_of_heads


@dataclass(frozen=True, slots=True)
class Narrow:
    """The inputs of a last layer that yields some rows alone."""

    rows: Tensor
    """[R] int64: the indices of the rows, at least one."""
    plan: AttentionPlan
    """The attention plan of these rows."""


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of a rotation, both [T, 1, head_dim], the first half of the sines negated: see
``baton_kernels.rotary.rotate``."""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of every layer in one forward pass, besides the activations."""

    pool: Tensor
    plan: AttentionPlan
    rotations: Sequence[Rotation]
    """The rotations of each kind of layer."""
    query_factors: Tensor | None = None
    """[T, 1, 1] float32: the factor of each token's queries (``QueryScale``); None: 1."""


@dataclass(frozen=True, slots=True)
class Increment:
    """What a part of a layer adds to the residual stream, before it is added."""

    value: Tensor
    """[T, hidden]."""
    norm: Norm | None = None
    """The norm that it passes first; None: no norm."""


def _span(rows: int | Rows) -> Rows:
    return range(rows) if isinstance(rows, int) else rows


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _of_heads(heads: range, head_dim: int) -> range:
    """The rows of the heads ``heads``."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _ordered(heads: range, head_dim: int, order: Sequence[int] | None) -> Rows:
    """The rows of the heads ``heads``, those of each head in ``order`` (None: as they are)."""
    if order is None:
        return _of_heads(heads, head_dim)
    return tuple(head * head_dim + row for head in heads for row in order)


class Embedding(nn.Module):
    """token_ids [T] -> [T, hidden]. With a part of the vocabulary, ids of other parts give zeros."""

    def __init__(self, ids: range, size: int, dtype: torch.dtype, *, is_part: bool) -> None:
        """``ids``: the token ids that have a row here."""
        super().__init__()
        self.ids = ids
        self.is_part = is_part
        self.weight = empty_parameter(len(ids), size, dtype=dtype)
        self.source = (_slice(ids), slice(None))

    def forward(self, token_ids: Tensor) -> Tensor:
        if not self.is_part:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.ids.start
        elsewhere = (rows < 0) | (rows >= len(self.ids))
        return F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill_(elsewhere[:, None], 0)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32. The result has the
    weight's type, whatever type x has."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, *, offset: float = 0.0, rows: Rows | None = None
    ) -> None:
        """``offset`` is added to the weight. ``rows``: the part of the checkpoint's weight that is here, in
        this order; None: all of it."""
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = empty_parameter(size, dtype=dtype)
        self.source: tuple[Index, ...] = (slice(None) if rows is None else index_of(rows),)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype and not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.as_norm.of(x).to(self.weight.dtype)

    @property
    def as_norm(self) -> Norm:
        """The norm, for kernels."""
        return Norm(self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype) if bias else None
        self.source: tuple[Index, ...] = (slice(None),)

    @property
    def as_norm(self) -> Norm:
        """The norm, for kernels."""
        return Norm(self.weight, self.eps, centered=True, bias=self.bias)


def stream_norm(config: ModelConfig, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """A norm over the hidden size, of the kind that the model has."""
    if config.layer_norm:
        return LayerNorm(config.hidden_size, config.norm_eps, dtype, bias=config.norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, offset=config.norm_offset)


class Linear(nn.Module):
    """[T, inputs] -> [T, outputs]: one projection, or several of the same input as one matmul. A range
    selects these inputs or outputs of the checkpoint's."""

    gated: ClassVar[bool] = False

    def __init__(
        self,
        inputs: int | range,
        outputs: int | Rows | Mapping[str, int | Rows],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        scheme: QuantizationScheme = PLAIN,
        activation: Activation | None = None,
    ) -> None:
        """``outputs`` of several projections are by each one's name in the checkpoint. ``dtype``: the type of
        inputs and outputs. ``activation`` is applied to the outputs."""
        super().__init__()
        parts = outputs if isinstance(outputs, Mapping) else {"": outputs}
        spans = {name: _span(rows) for name, rows in parts.items()}
        columns = range(inputs) if isinstance(inputs, int) else inputs
        shape = LinearShape(columns, spans, dtype, bias, self.gated, activation)
        weights = scheme.allocate(shape)
        for name, parameter in weights.parameters.items():
            self.register_parameter(name, parameter)
        self.weights: LinearWeights | None = weights
        """The weights until they are packed; None once they are no longer needed."""
        self.multiplier: Multiplier = weights

    def pack(self) -> None:
        """Lay the weights out as the kernels of their device read them, and free memory that is unused
        then."""
        assert self.weights is not None, "packed once"
        self.multiplier = self.weights.pack()
        if self.multiplier is not self.weights:
            for name in self.weights.parameters:
                self.register_parameter(name, None)
            self.weights = None

    @property
    def packed(self) -> PackedWeight | None:
        """The weights for a CPU's kernels; None if something else multiplies."""
        return self.multiplier if isinstance(self.multiplier, PackedWeight) else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplier.multiply(x)


class GatedLinear(Linear):
    """activation(gate(x)) * up(x): [T, inputs] -> [T, size]."""

    gated: ClassVar[bool] = True

    def __init__(
        self,
        inputs: int,
        size: int | range,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        scheme: QuantizationScheme = PLAIN,
        activation: Activation = SILU,
        fused: int = 0,
    ) -> None:
        """``fused``: the gate's rows where the checkpoint has both projections as one tensor; 0: it has
        two."""
        rows = _span(size)
        parts: dict[str, Rows] = {"gate_proj": rows, "up_proj": rows}
        if fused:
            parts = {"gate_up_proj": (*rows, *(fused + row for row in rows))}
        super().__init__(inputs, parts, dtype, bias=bias, scheme=scheme, activation=activation)


class Attention(nn.Module):
    """Grouped-query attention over the paged pool, of a rank's heads; the output is the sum over the heads of
    all ranks."""

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
        shard = parallel.shard
        self.collectives: Collectives = parallel.collectives
        self.layer = layer - shard.layers.start
        """The layer's index in the pool."""
        self.heads = len(shard.heads)
        self.kv_heads = len(shard.kv_heads)
        self.window = config.windows[layer]
        self.softcap = config.attention_softcap
        self.scale = config.scale
        self.rotation = rotation
        scale = config.query_scale
        self.scales_queries = scale is not None and not (scale.unrotated_only and config.ropes[layer])
        order = head_order(config.ropes[layer], config.head_dim)
        parts = _qkv_parts(config, shard.heads, shard.kv_heads, order)
        self.qkv_proj = Linear(config.hidden_size, parts, dtype, bias=config.qkv_bias, scheme=scheme)
        # One rank adds the bias: the outputs are summed.
        o_bias = config.o_bias and shard.tp_rank == 0
        query = _of_heads(shard.heads, config.head_dim)
        self.o_proj = Linear(query, config.hidden_size, dtype, bias=o_bias, scheme=scheme)
        self.sinks = empty_parameter(self.heads, dtype=torch.float32) if config.sinks else None
        self.source: tuple[Index, ...] = (_slice(shard.heads),)
        """The part of the checkpoint's sinks that is here."""
        self.head_norm = config.head_norm_of(layer)
        self._plain = torch.ones(config.head_dim, dtype=dtype)
        """The weight of a norm that has none."""
        self._eps = config.norm_eps
        self._is_alone = shard.tp_size == 1
        ranks = shard.tp_size * config.head_dim
        # Heads that several ranks hold count as often in the sums of squares as here.
        self._whole_sizes = (self.heads * ranks, self.kv_heads * ranks)
        self.q_norm = self.k_norm = None
        if self.head_norm in ("heads", "rotated", "whole"):
            whole = self.head_norm == "whole"
            q, k = (shard.heads, shard.kv_heads) if whole else (range(1), range(1))
            self.q_norm = _head_norm(config, q, order, dtype)
            self.k_norm = _head_norm(config, k, order, dtype)

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Puts K and V into the pool; returns the queries [T, heads, head_dim]."""
        qkv = self.qkv_proj(x)
        if (whole := self.whole_norm) is not None:
            self._norm_whole(qkv, whole)
        cos, sin = step.rotations[self.rotation]
        heads = qkv.view(x.shape[0], self.heads + 2 * self.kv_heads, -1)
        norm = self.norm_before_rotation
        q = rotate_and_store(step.pool, self.layer, heads, step.plan, cos=cos, sin=sin, norm=norm)
        if self.head_norm == "rotated":
            assert self.q_norm is not None and self.k_norm is not None
            q.mul_(self.q_norm.weight.float() * self.k_norm.weight)
        if self.scales_queries and step.query_factors is not None:
            q.mul_(step.query_factors)
        return q

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        q, plan = self.store(x, step), step.plan
        if narrow is not None:
            q, plan = q[narrow.rows], narrow.plan
        out = paged_attention(
            step.pool,
            self.layer,
            q,
            plan,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return self.collectives.sum(self.o_proj(out.flatten(1)))

    @property
    def adjusts_queries(self) -> bool:
        """Whether queries are multiplied by anything once they are rotated."""
        return self.scales_queries or self.head_norm == "rotated"

    @property
    def whole_norm(self) -> WholeNorm | None:
        """The norm of all heads together before they are rotated; None: no norm."""
        if self.head_norm != "whole":
            return None
        assert self.q_norm is not None and self.k_norm is not None
        return WholeNorm(self.q_norm.weight, self.k_norm.weight, self._eps, self.q_norm.offset)

    def _norm_whole(self, qkv: Tensor, norm: WholeNorm) -> None:
        if self._is_alone:
            norm_heads(qkv, norm)
        else:
            scale_heads(qkv, self.collectives.sum(squares_of_heads(qkv, norm)), norm, self._whole_sizes)

    @property
    def norm_before_rotation(self) -> HeadNorm | None:
        """The norm of each head before it is rotated; None: no norm.

        Rotating does not change a head's size. So a norm behind it divides as well in front of it; its
        weights, which multiply the same dimensions of queries and keys, are left to the queries."""
        match self.head_norm:
            case "heads":
                assert self.q_norm is not None and self.k_norm is not None
                return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)
            case "plain" | "rotated":
                return HeadNorm(self._plain, self._plain, self._eps)
            case _:
                return None


def _head_norm(config: ModelConfig, heads: range, order: Sequence[int] | None, dtype: torch.dtype) -> RMSNorm:
    """A norm over the dimensions of these heads together."""
    rows = _ordered(heads, config.head_dim, order)
    return RMSNorm(len(rows), config.norm_eps, dtype, offset=config.norm_offset, rows=rows)


def _qkv_parts(
    config: ModelConfig, heads: range, kv_heads: range, order: Sequence[int] | None
) -> dict[str, Rows]:
    """The rows of a rank's query, key and value heads in the checkpoint."""
    dim = config.head_dim
    q, k, v = _ordered(heads, dim, order), _ordered(kv_heads, dim, order), _of_heads(kv_heads, dim)
    if not config.fused_qkv:
        return {"q_proj": q, "k_proj": k, "v_proj": v}
    keys = config.num_heads * dim
    values = keys + config.num_kv_heads * dim
    return {"qkv_proj": (*q, *(keys + row for row in k), *(values + row for row in v))}


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202), or down(activation(up(x))), of a
    rank's inner rows; the output is the sum over the rows of all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
        size: int | None = None,
    ) -> None:
        """``size``: the inner rows of all ranks; None: intermediate_size."""
        super().__init__()
        shard, hidden, bias = parallel.shard, config.hidden_size, config.mlp_bias
        self.collectives: Collectives = parallel.collectives
        whole = config.intermediate_size if size is None else size
        inner, activation = shard.part(whole), config.activation
        self.gate_up_proj = (
            GatedLinear(
                hidden,
                inner,
                dtype,
                bias=bias,
                scheme=scheme,
                activation=activation,
                fused=whole if config.fused_gate_up else 0,
            )
            if config.gated_mlp
            else Linear(hidden, {"up_proj": inner}, dtype, bias=bias, scheme=scheme, activation=activation)
        )
        down_bias = bias and shard.tp_rank == 0
        self.down_proj = Linear(inner, hidden, dtype, bias=down_bias, scheme=scheme)

    @property
    def packed(self) -> tuple[PackedWeight, PackedWeight] | None:
        """The packed weights of both projections; None if one is not packed."""
        gate_up, down = self.gate_up_proj.packed, self.down_proj.packed
        return None if gate_up is None or down is None else (gate_up, down)

    def part(self, x: Tensor) -> Tensor:
        """The rank's part of the output, before the sum."""
        part: Tensor = self.down_proj(self.gate_up_proj(x))
        return part

    def forward(self, x: Tensor) -> Tensor:
        return self.collectives.sum(self.part(x))
