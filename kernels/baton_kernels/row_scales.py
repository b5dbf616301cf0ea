"""Scales of rows, by which weights are rounded to few bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AT_ONCE = 1 << 24
"""Elements that are rounded at a time: their float32 copies are 64 MiB each."""


def rounded_by_rows(
    weight: Tensor, largest: float, to_codes: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Codes [..., rows, inputs] of a weight of this shape and float32 scales [..., rows, 1], so that the
    largest magnitude of each row over its scale is ``largest``; of a row of zeros the scale is 1.
    ``to_codes`` rounds such quotients, float32 [n, inputs], which it may change."""
    *before, inputs = weight.shape
    rows = weight.reshape(-1, inputs)
    scales = torch.empty((len(rows), 1), dtype=torch.float32, device=weight.device)
    codes = to_codes(torch.empty((0, inputs), device=weight.device)).new_empty(rows.shape)
    at_once = max(1, AT_ONCE // max(1, inputs))
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once].float()
        magnitude = torch.linalg.vector_norm(part, torch.inf, dim=1, keepdim=True)
        scale = torch.where(magnitude == 0, 1.0, magnitude / largest)
        scales[start : start + at_once] = scale
        codes[start : start + at_once] = to_codes(part / scale)
    return codes.view(weight.shape), scales.view(*before, 1)
