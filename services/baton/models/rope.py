"""Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864) and the ways to stretch its reach.

All kinds but two come down to two tables, cosine and sine by position, built once when a model is loaded.
Parity is with transformers 5, which the tests use as their oracle.

Dynamic NTK and longrope need a decision. transformers derives the angles from the longest sequence that the
loaded model has seen, so the result of a request depends on the requests before it. Baton does what a freshly
loaded model would do: the tokens of a prompt have the angles of the whole prompt, a later token has those of
the sequence that ends with it. That depends on the request alone, so chunks, batches and workers make no
difference. But a prompt over the trained length gives its tokens angles of its own, so its blocks are of no
use to other requests: the prefix cache leaves it out (``ModelConfig.longest_shared_prompt``).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import RopeConfig

LONGEST_TABLE = 2**20
"""The most positions whose cosines and sines are kept: those of Llama 4's ten million would take 10 GB for
each kind of layer."""


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables over every position of a model, for one of its kinds of layers.

    All in float32: thousands of radians have no bits left in bfloat16, and a rounded cosine would bend every
    query and key.
    """

    cos: Tensor
    sin: Tensor
    frequencies: Tensor
    """Dynamic NTK: [max_model_len, head_dim / 2], radians per position by sequence length - 1. longrope: [2,
    head_dim / 2], of short and of long sequences. Other kinds, without a table: [1, head_dim / 2]."""
    factors: Tensor
    """All kinds without a table but dynamic NTK: [as many, head_dim], the factors of cos and sin."""

    def __init__(self, rope: RopeConfig | None, head_dim: int, num_positions: int) -> None:
        """``rope``: None for layers whose queries and keys are not rotated. Without memory, tables have
        shapes alone."""
        super().__init__()
        self._rope = rope
        by_length = rope is not None and rope.by_length
        self._has_table = not by_length and num_positions <= LONGEST_TABLE
        self._has_factors = not self._has_table and (rope is None or rope.kind != "dynamic")
        if (
            torch.get_default_device().type == "meta"
        ):  # to compute there torch imports sympy, which takes long
            if self._has_table:
                for name in ("cos", "sin"):
                    self.register_buffer(name, torch.empty(num_positions, head_dim), persistent=False)
        elif self._has_table:
            cos, sin = rope_tables(rope, head_dim, num_positions)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        elif rope is not None and rope.kind == "dynamic":
            frequencies = _dynamic_frequencies(rope, rope.rotated(head_dim), num_positions)
            self.register_buffer("frequencies", _padded(frequencies, head_dim), persistent=False)
        else:
            kinds = [_angles(rope, head_dim)]
            if rope is not None and rope.kind == "longrope":
                kinds.append(_long_angles(rope, head_dim))
            frequencies, factors = (torch.stack(rows) for rows in zip(*kinds, strict=True))
            self.register_buffer("frequencies", frequencies, persistent=False)
            self.register_buffer("factors", factors, persistent=False)

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and signed sin, both [T, 1, head_dim], as ``baton_kernels.rotary.rotate``
        takes them.

        ``lengths`` [T] are ``PagedBatch.lengths``; without them, every sequence ends at its token.
        """
        if self._has_table:
            return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        rows = self._rows(positions + 1 if lengths is None else lengths)
        cos, sin = cos_and_signed_sin(positions[:, None] * self.frequencies[rows])
        if self._has_factors:
            cos, sin = cos * self.factors[rows], sin * self.factors[rows]
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _rows(self, lengths: Tensor) -> Tensor:
        """lengths [T] of sequences -> the rows of their frequencies and factors."""
        rope = self._rope
        if rope is None or not rope.by_length:
            return torch.zeros_like(lengths)
        return lengths - 1 if rope.kind == "dynamic" else (lengths > rope.original_max_positions).long()


def rope_tables(rope: RopeConfig | None, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim] in float32; the first half of each sin row is negated.

    Dimensions that are not rotated have an angle of 0. Not for kinds whose angles depend on more than the
    position.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    frequencies, factors = _angles(rope, head_dim)
    cos, sin = cos_and_signed_sin(positions[:, None] * frequencies)
    return cos * factors, sin * factors


def head_order(rope: RopeConfig | None, head_dim: int) -> list[int] | None:
    """The order in which a head's dimensions are kept, so that i and i + head_dim / 2 are rotated together;
    None: the checkpoint's own.

    Queries and keys in one order of their own have the same products. So one kernel rotates all of a head or
    a part of it, neighbours or halves.
    """
    if rope is None:
        return None
    rotated = rope.rotated(head_dim)
    if rotated == head_dim and not rope.interleaved:
        return None
    half = rotated // 2
    first = list(range(0, rotated, 2) if rope.interleaved else range(half))
    second = list(range(1, rotated, 2) if rope.interleaved else range(half, rotated))
    rest = list(range(rotated, head_dim))
    return [*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :]]


def cos_and_signed_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """[T, head_dim / 2] radians -> two of [T, head_dim], the first half of sin negated."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(rope: RopeConfig, rotated: int) -> tuple[Tensor, float]:
    """Radians per position for each pair of the ``rotated`` dimensions, [rotated / 2] float32; the factor on
    cos and sin.

    For ``dynamic`` the frequencies are unstretched; for ``longrope`` they are a short sequence's.
    """
    plain = _plain_frequencies(rope.theta, rotated)
    match rope.kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3_frequencies(rope, plain), 1.0
        case "yarn":
            return _yarn_frequencies(rope, plain, rotated), _yarn_attention_factor(rope)
        case "longrope":
            return plain / torch.tensor(rope.short_factors), _longrope_factor(rope, rope.attention_factor)


def _padded(frequencies: Tensor, head_dim: int) -> Tensor:
    """[..., rotated / 2] -> [..., head_dim / 2]: dimensions that are not rotated have no frequency."""
    return F.pad(frequencies, (0, head_dim // 2 - frequencies.shape[-1]))


def _factors(rope: RopeConfig, head_dim: int, scale: float) -> Tensor:
    """[head_dim]: the factor of cos and sin, 1 for dimensions that are not rotated."""
    half = torch.ones(head_dim // 2)
    half[: rope.rotated(head_dim) // 2] = scale
    return torch.cat((half, half))


def _angles(rope: RopeConfig | None, head_dim: int) -> tuple[Tensor, Tensor]:
    """Radians per position, [head_dim / 2], and the factors of cos and sin, [head_dim]."""
    if rope is None:
        return torch.zeros(head_dim // 2), torch.ones(head_dim)
    frequencies, scale = inverse_frequencies(rope, rope.rotated(head_dim))
    return _padded(frequencies, head_dim), _factors(rope, head_dim, scale)


def _long_angles(rope: RopeConfig, head_dim: int) -> tuple[Tensor, Tensor]:
    """longrope's ``_angles`` of a sequence over the trained length."""
    plain = _plain_frequencies(rope.theta, rope.rotated(head_dim))
    scale = _longrope_factor(rope, rope.long_attention_factor)
    frequencies = plain / torch.tensor(rope.long_factors)
    return _padded(frequencies, head_dim), _factors(rope, head_dim, scale)


def _longrope_factor(rope: RopeConfig, stated: float | None) -> float:
    """longrope's factor on cos and sin (https://arxiv.org/abs/2402.13753, as Phi-3 has it): the square root
    of 1 + ln(factor) / ln(trained length) unless stated."""
    if stated is not None:
        return stated
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


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
