"""The layers that model families share. Activations are [T, ...]: all tokens of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton_kernels.attention import AttentionPlan, paged_attention, rotate_and_store
from baton_kernels.rotary import HeadNorm
from baton_kernels.rows import add_rms_norm, silu_mul


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


class Embedding(nn.Module):
    """token_ids [T] -> [T, hidden]."""

    def __init__(self, num_embeddings: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _empty(num_embeddings, size, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


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
        if x is None:
            normed: Tensor = self(residual)
            return normed
        return add_rms_norm(x, residual, self.weight, self.eps)


class Linear(nn.Module):
    """[T, inputs] -> [T, outputs]."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = _empty(outputs, inputs, dtype=dtype)
        self.bias = _empty(outputs, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of the same input as one matmul: [T, inputs] -> [T, sum of the parts' sizes]."""

    def __init__(
        self, inputs: int, parts: Mapping[str, int], dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__(inputs, sum(parts.values()), dtype, bias=bias)
        stops = accumulate(parts.values())
        self.parts = {
            name: slice(stop - size, stop) for (name, size), stop in zip(parts.items(), stops, strict=True)
        }
        """Name of each projection in the checkpoint -> its rows of the weight and bias."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged pool."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.window = config.windows[layer]
        self.scale = config.head_dim**-0.5
        query, key = self.heads * config.head_dim, self.kv_heads * config.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(query, config.hidden_size, dtype, bias=config.o_bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        qkv = self.qkv_proj(x).view(x.shape[0], self.heads + 2 * self.kv_heads, -1)
        q = rotate_and_store(
            step.pool, self.layer, qkv, step.plan, cos=step.cos, sin=step.sin, norm=self.head_norm
        )
        out = paged_attention(step.pool, self.layer, q, step.plan, scale=self.scale, window=self.window)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected

    @property
    def head_norm(self) -> HeadNorm | None:
        """What a family does to queries and keys before they are rotated."""
        return None


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = FusedLinear(hidden, {"gate_proj": inner, "up_proj": inner}, dtype, bias=bias)
        self.down_proj = Linear(inner, hidden, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return down
