"""Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864) and the ways to stretch its reach.

All kinds but one come down to two tables, cosine and sine by position, built once when a model is loaded.
Parity is with transformers 5, which the tests use as their oracle.

Dynamic NTK needs a decision. transformers derives the base from the longest sequence that the loaded model
has seen, so the result of a request depends on the requests before it. Baton does what a freshly loaded model
would do: the tokens of a prompt have the base of the whole prompt, a later token has the base of the sequence
that ends with it. That depends on the request alone, so chunks, batches and workers make no difference. But a
prompt over the trained length gives its tokens a base of its own, so its blocks are of no use to other
requests: the prefix cache leaves it out (``ModelConfig.longest_shared_prompt``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig, RopeConfig


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables over every position of a model.

    All in float32: thousands of radians have no bits left in bfloat16, and a rounded cosine would bend every
    query and key.
    """

    cos: Tensor
    sin: Tensor
    frequencies: Tensor
    """[max_model_len, head_dim / 2]: radians per position by sequence length - 1. Dynamic NTK only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dynamic = config.rope.kind == "dynamic"
        if self.dynamic:
            frequencies = _dynamic_frequencies(config.rope, config.head_dim, config.max_model_len)
            self.register_buffer("frequencies", frequencies, persistent=False)
            return
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_model_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and signed sin, both [T, 1, head_dim], as ``baton_kernels.rotary.rotate``
        takes them.

        ``lengths`` [T] are ``PagedBatch.lengths``; without them, every sequence ends at its token.
        """
        if not self.dynamic:
            return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        last = positions if lengths is None else lengths - 1
        cos, sin = cos_and_signed_sin(positions[:, None] * self.frequencies[last])
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim] in float32; the first half of each sin row is negated.

    Not for ``dynamic``, whose angles depend on more than the position.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    frequencies, scale = inverse_frequencies(rope, head_dim)
    cos, sin = cos_and_signed_sin(positions[:, None] * frequencies)
    return cos * scale, sin * scale


def cos_and_signed_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """[T, head_dim / 2] radians -> two of [T, head_dim], the first half of sin negated."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions, [head_dim / 2] float32; the factor on cos and sin.

    For ``dynamic`` the frequencies are unstretched.
    """
    plain = _plain_frequencies(rope.theta, head_dim)
    match rope.kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3_frequencies(rope, plain), 1.0
        case "yarn":
            return _yarn_frequencies(rope, plain, head_dim), _yarn_attention_factor(rope)


def _plain_frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def _dynamic_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim / 2]: NTK-aware frequencies of a sequence of each length from 1 on.

    base' = base * (factor * max(length, trained) / trained - (factor - 1)) ** (dim / (dim - 2))
    """
    lengths = torch.arange(1, num_positions + 1, dtype=torch.float64).clamp(min=rope.original_max_positions)
    growth = rope.factor * lengths / rope.original_max_positions - (rope.factor - 1)
    bases = rope.theta * growth ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return (1.0 / bases[:, None] ** exponents).to(torch.float32)


def _llama3_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_positions / wavelengths
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn_frequencies(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): blend by turns within the trained length."""

    def dimension_turning(times: float) -> float:
        per_turn = rope.original_max_positions / (times * 2 * math.pi)
        return head_dim * math.log(per_turn) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs some width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature (section 3.4), folded into cos and sin: 0.1 ln(factor) + 1 unless stated."""

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
