"""Weights rounded to fp8, with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.quantized import QuantizedWeight
from baton_kernels.row_scales import rounded_by_rows

LARGEST = 448.0
"""The largest number of e4m3."""


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """Rounds a weight [..., rows, inputs] to e4m3, each row by itself: its largest magnitude becomes 448, and
    each element is rounded to the nearest number of its scale (ties to even). A row of zeros stays zeros."""
    codes, scales = rounded_by_rows(
        weight, LARGEST, lambda steps: steps.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    )
    return QuantizedWeight("fp8", codes, scales)
