"""Keys and values in FP8: e4m3, of four bits of exponent and three of mantissa, whose largest number is 448.

A pool of FP8 holds codes. A code stands for its number times the layer's scale, so a key or value is divided
by the scale, in float32, rounded to the nearest code (ties to even) and bounded to 448 when it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
ON_ONE_THREAD = 1 << 15
"""The most numbers that torch converts on the calling thread of a CPU. Blocks arrive on threads of their own,
beside a step that has all others."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of one layer's keys and values in a pool of FP8; pools of other types have none. ValueError
    for a scale that is not finite and above 0."""

    k: float = 1.0
    v: float = 1.0

    def __post_init__(self) -> None:
        for name, scale in (("k_scale", self.k), ("v_scale", self.v)):
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{name} is {scale}; allowed: finite and above 0")

    @property
    def factors(self) -> tuple[float, float]:
        """What keys and values are multiplied by when they are stored."""
        return 1 / self.k, 1 / self.v


UNSCALED = KVScales()


def check_scales(pool: Tensor, scales: KVScales) -> None:
    """ValueError for scales of a pool that has none."""
    if scales != UNSCALED and pool.dtype != FP8:
        raise ValueError(f"scales are {scales}; allowed with a pool of {pool.dtype}: {UNSCALED}")


def to_codes(x: Tensor, factor: float | Tensor) -> Tensor:
    """x, of a float type, times ``factor``, a number or float32 that is broadcast, as codes: FP8 of x's
    shape."""
    return (x.float() * factor).clamp(-LARGEST, LARGEST).to(FP8)


class KVConversion:
    """K and V of some layers from a pool of one type to a pool of another: from numbers to FP8, as a pool of
    FP8 stores them, or from FP8 to numbers, each code times its scale in float32 and rounded once."""

    def __init__(
        self, source: torch.dtype, target: torch.dtype, scales: Sequence[KVScales], device: torch.device
    ) -> None:
        """``scales``: of each layer. ValueError unless one of the types is FP8, and one alone."""
        if (source == FP8) == (target == FP8):
            raise ValueError(f"{source} to {target}; allowed: one of them {FP8}")
        self.source = source
        self._target = target
        factors = [each.factors if target == FP8 else (each.k, each.v) for each in scales]
        self._factors = torch.tensor(factors, dtype=torch.float32, device=device).flatten()
        self._numbers = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).float()
        """The number of each code: on a CPU, torch is slow to convert FP8."""

    def __call__(self, blocks: Tensor) -> Tensor:
        """blocks [N, heads, layers, 2, tokens, dim] of the source's type, contiguous -> the same of the
        target's."""
        vectors = blocks.flatten(4).flatten(0, 3)
        factors = self._factors.repeat(len(vectors) // len(self._factors))[:, None]
        made = torch.empty(vectors.shape, dtype=self._target, device=vectors.device)
        count = len(vectors) if vectors.is_cuda else max(1, ON_ONE_THREAD // vectors.shape[1])
        for start in range(0, len(vectors), count):
            part = slice(start, start + count)
            made[part] = self._converted(vectors[part], factors[part])
        return made.view(blocks.shape)

    def _converted(self, vectors: Tensor, factors: Tensor) -> Tensor:
        if self._target == FP8:
            return to_codes(vectors, factors)
        codes = vectors.view(torch.uint8).int()
        numbers = self._numbers.index_select(0, codes.view(-1)).view(vectors.shape)
        return (numbers * factors).to(self._target)


def as_stored(x: Tensor, factor: float, pool: Tensor) -> Tensor:
    """x as ``pool`` holds it, in the type of :func:`in_place`."""
    return to_codes(x, factor).view(torch.uint8) if pool.dtype == FP8 else x


def in_place(pool: Tensor) -> Tensor:
    """``pool`` in a type that torch can write to by index: bytes in place of FP8."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool
