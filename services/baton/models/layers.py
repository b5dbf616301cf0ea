"""The layers that model families share. Activations are [T, ...]: all tokens of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import ModelError
from baton.models.config import ModelConfig
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.attention import AttentionPlan, paged_attention, rotate_and_store
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.int8 import Int8Weight
from baton_kernels.rotary import HeadNorm
from baton_kernels.rows import add_rms_norm, silu_mul


@dataclass(frozen=True, slots=True)
class Narrow:
    """What a last layer needs that yields some rows alone."""

    rows: Tensor
    """[R] int64, at least one."""
    plan: AttentionPlan
    """Of these rows."""


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass needs besides its input."""

    pool: Tensor
    plan: AttentionPlan
    cos: Tensor
    """[T, 1, head_dim]"""
    sin: Tensor
    """[T, 1, head_dim], the first half negated: see ``baton_kernels.rotary.rotate``."""


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _span(rows: int | range) -> range:
    return range(rows) if isinstance(rows, int) else rows


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _of_heads(heads: range, head_dim: int) -> range:
    """The rows of these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


class Embedding(nn.Module):
    """token_ids [T] -> [T, hidden]. Of a vocabulary in parts, ids of other parts give zeros."""

    def __init__(self, ids: range, size: int, dtype: torch.dtype, *, is_part: bool) -> None:
        """``ids``: those that have a row here."""
        super().__init__()
        self.ids = ids
        self.is_part = is_part
        self.weight = _empty(len(ids), size, dtype=dtype)
        self.source = (_slice(ids), slice(None))

    def forward(self, token_ids: Tensor) -> Tensor:
        if not self.is_part:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.ids.start
        elsewhere = (rows < 0) | (rows >= len(self.ids))
        return F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill_(elsewhere[:, None], 0)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32. The result has the
    weight's type, whatever x has."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _empty(size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)

    def after_adding(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add x (None: nothing) to ``residual``, in place, and normalize the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Linear(nn.Module):
    """[T, inputs] -> [T, outputs]. A range stands for these inputs or outputs out of those in the
    checkpoint."""

    gated: ClassVar[bool] = False

    def __init__(
        self, inputs: int | range, outputs: int | range, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__()
        columns, rows = _span(inputs), _span(outputs)
        self.weight = _empty(len(rows), len(columns), dtype=dtype)
        self.bias = _empty(len(rows), dtype=dtype) if bias else None
        self.source = (_slice(rows), _slice(columns))
        """The part of the checkpoint's tensor that fills the weight; the bias has its rows."""
        self.scales: Tensor | None = None
        """Of the weight's rows, once it is int8."""
        self.dtype = dtype
        self.packed: PackedWeight | None = None

    def quantize(self) -> None:
        """Have the weight as int8, with a scale for each row, before it is filled. ModelError if there is no
        kernel for its size."""
        outputs, inputs = self.weight.shape
        if inputs % 2:
            raise ModelError(
                f"quantization is int8; allowed for a projection of {inputs} inputs, an odd number: none"
            )
        self.weight = _empty(outputs, inputs, dtype=torch.int8)
        self.scales = torch.empty(outputs, dtype=torch.float32)

    def pack(self) -> None:
        """Lay the weight out as the kernels of a CPU read it, and give the plain one up. Nothing happens
        elsewhere."""
        weight = self.weight if self.scales is None else Int8Weight(self.weight, self.scales)
        self.packed = PackedWeight.of(weight, self.bias, gated=self.gated, dtype=self.dtype)
        if self.packed is not None:
            self.weight, self.scales = _empty(0, dtype=self.dtype), None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.multiply(x)
        return F.linear(x, self.weight, self.bias)


class FusedPart(NamedTuple):
    """One projection of several."""

    rows: slice
    """Of the fused weight and bias."""
    source: slice
    """The rows of the checkpoint's tensors that fill them."""


class FusedLinear(Linear):
    """Several projections of the same input as one matmul: [T, inputs] -> [T, sum of the parts' sizes]."""

    def __init__(
        self, inputs: int, parts: Mapping[str, int | range], dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        spans = {name: _span(rows) for name, rows in parts.items()}
        stops = list(accumulate(len(rows) for rows in spans.values()))
        super().__init__(inputs, stops[-1], dtype, bias=bias)
        self.parts = {
            name: FusedPart(slice(stop - len(rows), stop), _slice(rows))
            for (name, rows), stop in zip(spans.items(), stops, strict=True)
        }
        """By each projection's name in the checkpoint."""


class GatedLinear(FusedLinear):
    """silu(gate(x)) * up(x): [T, inputs] -> [T, size]."""

    gated: ClassVar[bool] = True

    def __init__(self, inputs: int, size: int | range, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__(inputs, {"gate_proj": size, "up_proj": size}, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        return product if self.packed is not None else silu_mul(product)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged pool, of a rank's heads; the output is the
    sum over all of them."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, parallel: Parallel) -> None:
        """``layer``: of the whole model."""
        super().__init__()
        shard = parallel.shard
        self.collectives: Collectives = parallel.collectives
        self.layer = layer - shard.layers.start
        """In the pool."""
        self.heads = len(shard.heads)
        self.kv_heads = len(shard.kv_heads)
        self.window = config.windows[layer]
        self.scale = config.head_dim**-0.5
        query, key = _of_heads(shard.heads, config.head_dim), _of_heads(shard.kv_heads, config.head_dim)
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, dtype, bias=config.qkv_bias)
        # One rank adds the bias: the outputs are summed.
        self.o_proj = Linear(query, config.hidden_size, dtype, bias=config.o_bias and shard.tp_rank == 0)

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Puts K and V into the pool; the queries [T, heads, head_dim]."""
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
        """What a family does to queries and keys before they are rotated."""
        return None


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202), of a rank's inner rows; the output is
    the sum over all of them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel) -> None:
        super().__init__()
        shard = parallel.shard
        self.collectives: Collectives = parallel.collectives
        hidden, inner, bias = config.hidden_size, shard.inner, config.mlp_bias
        self.gate_up_proj = GatedLinear(hidden, inner, dtype, bias=bias)
        self.down_proj = Linear(inner, hidden, dtype, bias=bias and shard.tp_rank == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.collectives.sum(self.down_proj(self.gate_up_proj(x)))
