"""Weights as FP8 (e4m3) with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.quantized import QuantizedWeight

LARGEST = 448.0
"""The largest number of e4m3."""


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """Rounds a weight, each row by itself: its largest magnitude becomes 448, and each element is rounded to
    the nearest number of e4m3 (ties to even). A row of zeros stays zeros."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    for number, row in enumerate(weight):
        row = row.float()
        largest = torch.linalg.vector_norm(row, torch.inf)
        scale = torch.where(largest == 0, 1.0, largest / LARGEST)
        scales[number] = scale
        codes[number] = (row / scale).clamp_(-LARGEST, LARGEST)
    return QuantizedWeight("fp8", codes, scales)
