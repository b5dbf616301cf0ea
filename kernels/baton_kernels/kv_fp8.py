"""Keys and values in FP8: e4m3, of four bits of exponent and three of mantissa, whose largest number is 448.

A pool of FP8 holds codes. A code stands for its number times the layer's scale, so a key or value is divided
by the scale, in float32, rounded to the nearest code (ties to even) and bounded to 448 when it is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


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


def to_codes(x: Tensor, factor: float) -> Tensor:
    """x, of a float type, times ``factor``, as codes: FP8 of the same shape."""
    return (x.float() * factor).clamp(-LARGEST, LARGEST).to(FP8)


def as_stored(x: Tensor, factor: float, pool: Tensor) -> Tensor:
    """x as ``pool`` holds it, in the type of :func:`in_place`."""
    return to_codes(x, factor).view(torch.uint8) if pool.dtype == FP8 else x


def in_place(pool: Tensor) -> Tensor:
    """``pool`` in a type that torch can write to by index: bytes in place of FP8."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool
