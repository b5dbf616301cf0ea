"""The operations on queries and keys between their projection and the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An RMS norm over each head of the queries and of the keys."""

    q: Tensor
    """[head_dim]: the weight for queries."""
    k: Tensor
    """[head_dim]: the weight for keys."""
    eps: float
    offset: float = 0.0
    """A number added to both weights (Gemma: 1)."""


@dataclass(frozen=True, slots=True)
class WholeNorm:
    """An RMS norm over all heads of the queries together, and one over those of the keys (OLMo 2)."""

    q: Tensor
    """[heads * head_dim]: the weight for queries."""
    k: Tensor
    """[kv_heads * head_dim]: the weight for keys."""
    eps: float
    offset: float = 0.0
    """A number added to both weights."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [T, heads, head_dim] by its position's angle.

    cos and sin are [T, 1, head_dim] in float32. ``sin`` carries the minus of the first half, so that
    rotate-half is a roll. Computed in float32, rounded once to the type of x.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def normed_and_rotated(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor, norm: HeadNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, heads + 2 * kv_heads, head_dim] -> q [T, heads, head_dim] and k [T, kv_heads, head_dim], both
    normed and rotated, and v."""
    rotated = heads + kv_heads
    qk, v = qkv[:, :rotated], qkv[:, rotated:]
    if norm is not None:
        q, k = _normed(qk[:, :heads], norm.q, norm), _normed(qk[:, heads:], norm.k, norm)
        qk = torch.cat((q, k), dim=1)
    qk = rotate(qk, cos, sin)  # both turn by the same angles
    return qk[:, :heads], qk[:, heads:], v


def _normed(x: Tensor, weight: Tensor, norm: HeadNorm) -> Tensor:
    if not norm.offset:
        return F.rms_norm(x, weight.shape, weight, norm.eps)
    return F.rms_norm(x.float(), weight.shape, weight.float() + norm.offset, norm.eps).to(x.dtype)
