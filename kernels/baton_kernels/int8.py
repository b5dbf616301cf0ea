"""Weights rounded to int8, with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.quantized import QuantizedWeight
from baton_kernels.row_scales import rounded_by_rows

LARGEST = 127


def quantize(weight: Tensor) -> QuantizedWeight:
    """Rounds a weight [..., rows, inputs] symmetrically, each row by itself: its largest magnitude becomes
    127, and each element is rounded to the nearest step (ties to even), so no element is off by more than
    half a scale. A row of zeros stays zeros."""
    codes, scales = rounded_by_rows(
        weight, LARGEST, lambda steps: steps.round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    )
    return QuantizedWeight("int8", codes, scales)
