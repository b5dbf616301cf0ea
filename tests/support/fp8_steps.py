"""Pools of FP8 for the tests of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.kv_fp8 import FP8, KVScales, to_codes

ALL_CODES = torch.arange(127, dtype=torch.uint8).view(FP8)
"""The codes of all numbers from 0 to 448, ascending."""


def encoded(pool: Tensor, scales: KVScales) -> Tensor:
    """The codes of a pool of K and V."""
    k, v = (to_codes(pool[:, :, :, part], factor) for part, factor in enumerate(scales.factors))
    return torch.stack((k.view(torch.uint8), v.view(torch.uint8)), dim=3).view(FP8)


def dequantized(pool: Tensor, scales: KVScales) -> Tensor:
    """The numbers that a pool of FP8 holds, float64."""
    factors = torch.tensor([scales.k, scales.v], dtype=torch.float64)
    return pool.double() * factors[:, None, None]
