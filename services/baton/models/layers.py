"""The layers that model families share. Activations are [T, ...]: all tokens of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.quantization.base import (
    ExpertsMultiplier,
    ExpertsShape,
    ExpertsWeights,
    LinearShape,
    LinearWeights,
    Multiplier,
    Place,
    QuantizationScheme,
    empty_parameter,
)
from baton.models.quantization.plain import PLAIN
from baton.parallel.collectives import Collectives, Parallel
from baton.parallel.shard import split
from baton_kernels.activation_kind import SILU, Activation
from baton_kernels.attention import AttentionPlan, paged_attention, rotate_and_store
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.rotary import HeadNorm
from baton_kernels.routing import route
from baton_kernels.rows import Norm, add_norm


@dataclass(frozen=True, slots=True)
class Narrow:
    """The inputs of a last layer that yields some rows alone."""

    rows: Tensor
    """[R] int64: the indices of the rows, at least one."""
    plan: AttentionPlan
    """The attention plan of these rows."""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of every layer in one forward pass, besides the activations."""

    pool: Tensor
    plan: AttentionPlan
    cos: Tensor
    """Cosines of the rotation, [T, 1, head_dim]."""
    sin: Tensor
    """Sines of the rotation, [T, 1, head_dim], the first half negated: see
    ``baton_kernels.rotary.rotate``."""


def _span(rows: int | range) -> range:
    return range(rows) if isinstance(rows, int) else rows


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _of_heads(heads: range, head_dim: int) -> range:
    """The rows of the heads ``heads``."""
    return range(heads.start * head_dim, heads.stop * head_dim)


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

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)

    @property
    def as_norm(self) -> Norm:
        """The norm, for kernels."""
        return Norm(self.weight, self.eps)

    def after_adding(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add x (None: nothing) to ``residual``, in place, and normalize the sum."""
        return add_norm(x, residual, self.as_norm, self.weight.dtype)


class Linear(nn.Module):
    """[T, inputs] -> [T, outputs]: one projection, or several of the same input as one matmul. A range
    selects these inputs or outputs of the checkpoint's."""

    gated: ClassVar[bool] = False

    def __init__(
        self,
        inputs: int | range,
        outputs: int | range | Mapping[str, int | range],
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
        weights = scheme.allocate(LinearShape(_span(inputs), spans, dtype, bias, self.gated, activation))
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
    ) -> None:
        parts = {"gate_proj": size, "up_proj": size}
        super().__init__(inputs, parts, dtype, bias=bias, scheme=scheme, activation=activation)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged pool, of a rank's heads; the output is the
    sum over the heads of all ranks."""

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
        shard = parallel.shard
        self.collectives: Collectives = parallel.collectives
        self.layer = layer - shard.layers.start
        """The layer's index in the pool."""
        self.heads = len(shard.heads)
        self.kv_heads = len(shard.kv_heads)
        self.window = config.windows[layer]
        self.scale = config.head_dim**-0.5
        query, key = _of_heads(shard.heads, config.head_dim), _of_heads(shard.kv_heads, config.head_dim)
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = Linear(config.hidden_size, parts, dtype, bias=config.qkv_bias, scheme=scheme)
        # One rank adds the bias: the outputs are summed.
        o_bias = config.o_bias and shard.tp_rank == 0
        self.o_proj = Linear(query, config.hidden_size, dtype, bias=o_bias, scheme=scheme)

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Puts K and V into the pool; returns the queries [T, heads, head_dim]."""
        qkv = self.qkv_proj(x).view(x.shape[0], self.heads + 2 * self.kv_heads, -1)
        return rotate_and_store(
            step.pool, self.layer, qkv, step.plan, cos=step.cos, sin=step.sin, norm=self.head_norm
        )

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        q, plan = self.store(x, step), step.plan
        if narrow is not None:
            q, plan = q[narrow.rows], narrow.plan
        out = paged_attention(step.pool, self.layer, q, plan, scale=self.scale, window=self.window)
        return self.collectives.sum(self.o_proj(out.flatten(1)))

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm that a family applies to queries and keys before they are rotated; None: no norm."""
        return None


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202), of a rank's inner rows; the output is
    the sum over the rows of all ranks."""

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
        shard = parallel.shard
        self.collectives: Collectives = parallel.collectives
        inner = shard.inner if size is None else split(size, shard.tp_size, shard.tp_rank)
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_up_proj = GatedLinear(hidden, inner, dtype, bias=bias, scheme=scheme)
        down_bias = bias and shard.tp_rank == 0
        self.down_proj = Linear(inner, hidden, dtype, bias=down_bias, scheme=scheme)

    def part(self, x: Tensor) -> Tensor:
        """The rank's part of the output, before the sum."""
        part: Tensor = self.down_proj(self.gate_up_proj(x))
        return part

    def forward(self, x: Tensor) -> Tensor:
        return self.collectives.sum(self.part(x))


class Experts(nn.Module):
    """A mixture of experts (https://arxiv.org/abs/1701.06538): a router chooses some MLPs for each token; one
    more, with some families, is for every token. Of a rank's inner rows of each; the output is the sum over
    the rows of all ranks."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel, scheme: QuantizationScheme
    ) -> None:
        super().__init__()
        assert config.experts is not None, "a family's config names them"
        self.rule = rule = config.experts
        self.collectives: Collectives = parallel.collectives
        shard, hidden, number = parallel.shard, config.hidden_size, rule.num_experts
        numbers = torch.float32 if rule.router_float32 else dtype
        outputs = {"": range(number)}
        self.router_weights: LinearWeights | None = PLAIN.allocate(
            LinearShape(range(hidden), outputs, numbers, rule.router_bias)
        )
        """The router's weights until they are packed; None once they are no longer needed."""
        self.router: Multiplier = self.router_weights
        shape = ExpertsShape(
            experts=range(number),
            hidden=hidden,
            inner=split(rule.inner, shard.tp_size, shard.tp_rank),
            dtype=dtype,
            activation=rule.activation,
            bias=rule.bias,
            down_bias=rule.bias and shard.tp_rank == 0,
        )
        self.weights: ExpertsWeights | None = scheme.allocate_experts(shape)
        """The experts' weights until they are packed; None once they are no longer needed."""
        self.experts: ExpertsMultiplier = self.weights
        for name, parameter in self.router_weights.parameters.items():
            self.register_parameter(f"router_{name}", parameter)
        for name, parameter in self.weights.parameters.items():
            self.register_parameter(name, parameter)
        self.correction = empty_parameter(number, dtype=torch.float32) if rule.correction_bias else None
        self.shared_gate = empty_parameter(1, hidden, dtype=dtype) if rule.shared_gate else None
        if rule.shared:
            self.add_module(rule.shared, SwiGLU(config, dtype, parallel, scheme, rule.shared_inner))

    def places(self) -> dict[str, Place]:
        """The places of the layer's tensors by their names relative to the layer, without those of the MLP
        that is for every token; none once its weights are given up."""
        rule, found = self.rule, dict[str, Place]()
        if self.router_weights is not None:
            for kind, place in self.router_weights.places()[""].items():
                found[f"{rule.router}.{kind}"] = place
        if self.weights is not None:
            found |= self.weights.places(rule.names)
        if self.correction is not None:
            tensor = self.correction[None] if rule.correction_rows else self.correction
            found[rule.correction_bias] = Place(tensor, (slice(None),) * tensor.dim())
        if self.shared_gate is not None:
            found[rule.shared_gate] = Place(self.shared_gate, (slice(None), slice(None)))
        return found

    def pack(self) -> None:
        """Lay the weights out as the kernels of their device read them, and free memory that is unused
        then."""
        assert self.router_weights is not None and self.weights is not None, "packed once"
        self.router, self.experts = self.router_weights.pack(), self.weights.pack()
        if self.router is not self.router_weights:
            for name in self.router_weights.parameters:
                self.register_parameter(f"router_{name}", None)
            self.router_weights = None
        if self.experts is not self.weights:
            for name in self.weights.parameters:
                self.register_parameter(name, None)
            self.weights = None

    def forward(self, x: Tensor) -> Tensor:
        routing = self.rule.routing
        own = x.float() if self.rule.router_float32 else x
        experts, weights = route(self.router.multiply(own, torch.float32), routing, self.correction)
        out = self.experts.multiply(x, experts, weights, routing.weighs_input)
        if self.rule.shared:
            out = out + self._shared(x)
        return self.collectives.sum(out)

    def _shared(self, x: Tensor) -> Tensor:
        """The rank's part of the MLP that is for every token."""
        part = cast(SwiGLU, self.get_submodule(self.rule.shared)).part(x)
        if self.shared_gate is None:
            return part
        return part * torch.sigmoid(F.linear(x, self.shared_gate))
