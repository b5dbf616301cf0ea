"""Weights as int8 with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.quantized import QuantizedWeight

LARGEST = 127
_AT_ONCE = 1 << 24
"""Elements that are rounded at a time: their float32 copies are 64 MiB each."""


def quantize(weight: Tensor) -> QuantizedWeight:
    """Rounds a weight symmetrically, each row by itself: its largest magnitude becomes 127, and each element
    is rounded to the nearest step (ties to even), so no element is off by more than half a scale. A row of
    zeros stays zeros."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    at_once = max(1, _AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, len(weight), at_once):
        rows = weight[start : start + at_once].float()
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=1)
        scale = torch.where(largest == 0, 1.0, largest / LARGEST)
        scales[start : start + at_once] = scale
        values[start : start + at_once] = (rows / scale[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return QuantizedWeight("int8", values, scales[:, None])
