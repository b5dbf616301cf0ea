"""Quantized weights of random codes and scales, for the tests of the kernels that multiply with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.code_formats import CodeFormat, Rounding
from baton_kernels.quantized import QuantizedWeight, joined


@dataclass(frozen=True)
class QuantizedKind:
    """A kind of quantized weight, as checkpoints have it."""

    format: CodeFormat
    group: int = 0
    """The inputs that share a scale; 0: all."""
    scale: torch.dtype = torch.float32
    zeros: bool = False
    factors: bool = False
    order: bool = False
    rounding: Rounding = "none"

    def weight(self, *shape: int) -> QuantizedWeight:
        """A random weight [rows, inputs], or [E, rows, inputs]. Elements are about as large as is usual."""
        *before, inputs = shape
        groups = (*before, inputs // self.group if self.group else 1)
        size = {"int8": 73.0, "fp8": 100.0, "int4": 4.6, "fp4": 3.0}[self.format] * inputs**0.5
        scales = (0.5 + torch.rand(groups)) / size
        factors = None
        if self.factors:
            factors = (0.5 + torch.rand(before)) / 64
            scales *= 64
        if self.scale == torch.float8_e8m0fnu:
            scales = (scales.log2().round() + 127).to(torch.uint8).view(self.scale)
        return QuantizedWeight(
            self.format,
            self._codes(*shape),
            scales.to(self.scale),
            zeros=self._zeros(groups),
            factors=factors,
            order=torch.randperm(inputs) if self.order else None,
            rounding=self.rounding,
            input_scale=torch.tensor(0.01) if self.rounding == "fp8-tensor" else None,
        )

    def _codes(self, *shape: int) -> Tensor:
        if self.format == "int8":
            return torch.randint(-128, 128, shape, dtype=torch.int8)
        if self.format == "fp8":
            codes = torch.randint(0, 256, shape, dtype=torch.uint8)
            codes[codes & 127 == 127] = 0  # stands for NaN
            return codes.view(torch.float8_e4m3fn)
        return joined(torch.randint(0, 16, shape, dtype=torch.uint8))

    def _zeros(self, groups: tuple[int, ...]) -> Tensor | None:
        if not self.zeros:
            return None
        if self.format == "int4":
            return torch.randint(0, 16, groups, dtype=torch.uint8)
        return torch.randint(-128, 128, groups, dtype=torch.int8)


KINDS = {
    "int8 rows": QuantizedKind("int8"),
    "int8 groups of 32, zeros": QuantizedKind("int8", 32, torch.bfloat16, zeros=True),
    "fp8 rows": QuantizedKind("fp8", factors=True),
    "fp8 groups of 128": QuantizedKind("fp8", 128),
    "int4 rows, zeros": QuantizedKind("int4", 0, torch.float16, zeros=True),
    "int4 groups of 32": QuantizedKind("int4", 32, torch.bfloat16),
    "int4 groups of 64, zeros, order": QuantizedKind("int4", 64, torch.float16, zeros=True, order=True),
    "int4 groups of 128, zeros": QuantizedKind("int4", 128, torch.bfloat16, zeros=True),
    "int4 groups of 48": QuantizedKind("int4", 48),
    "MXFP4": QuantizedKind("fp4", 32, torch.float8_e8m0fnu),
    "NVFP4": QuantizedKind("fp4", 16, torch.float8_e4m3fn, factors=True),
}
ROUNDED: dict[Rounding, QuantizedKind] = {
    "fp8-row": QuantizedKind("fp8", factors=True, rounding="fp8-row"),
    "fp8-tensor": QuantizedKind("fp8", rounding="fp8-tensor"),
    "fp8-group": QuantizedKind("fp8", 128, rounding="fp8-group"),
    "int8-row": QuantizedKind("int8", rounding="int8-row"),
}


def on(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    """The weight on another device."""
    parts = ("codes", "scales", "zeros", "factors", "order", "input_scale")
    found = {name: getattr(weight, name) for name in parts}
    return replace(weight, **{name: part.to(device) for name, part in found.items() if part is not None})
