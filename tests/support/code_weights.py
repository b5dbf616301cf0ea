"""Random weights of every quantized form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.code_formats import CodeFormat
from baton_kernels.quantized import QuantizedWeight, joined


@dataclass(frozen=True, slots=True)
class Form:
    """One way to keep a weight."""

    format: CodeFormat
    group: int | None = None
    """The inputs of a group; None: a row is one."""
    scales: torch.dtype = torch.float32
    zeros: bool = False
    factors: bool = False

    def __str__(self) -> str:
        told = (self.format, self.group or "rows", str(self.scales).removeprefix("torch."))
        return "-".join((*map(str, told), *(("zeros",) if self.zeros else ())))


FORMS = (
    Form("int8"),
    Form("int8", 128, torch.bfloat16),
    Form("int8", zeros=True),
    Form("fp8", factors=True),
    Form("fp8", 128),
    Form("int4"),
    Form("int4", 128, torch.float16, zeros=True),
    Form("int4", 64, torch.bfloat16),
    Form("int4", 32, torch.float16),
    Form("fp4", 32, torch.float8_e8m0fnu),
    Form("fp4", 16, torch.float8_e4m3fn, factors=True),
)
"""What checkpoints hold."""


def random_weight(form: Form, *shape: int, ordered: bool = False) -> QuantizedWeight:
    """A weight of this shape, with every code that there is, and scales from subnormal numbers up.
    ``ordered``: its columns belong to inputs in another order."""
    *before, inputs = shape
    of_groups = (*before, inputs // (form.group or inputs))
    zeros: Tensor | None = None
    match form.format:
        case "int8":
            codes = torch.randint(-128, 128, shape).to(torch.int8)
            zeros = torch.randint(-128, 128, of_groups).to(torch.int8)
        case "fp8":
            numbers = torch.randint(0, 254, shape)
            numbers += numbers >= 127  # 127 and 255 are no numbers
            codes = numbers.to(torch.uint8).view(torch.float8_e4m3fn)
        case "int4" | "fp4":
            codes = joined(torch.randint(0, 16, shape).to(torch.uint8))
            zeros = torch.randint(0, 16, of_groups).to(torch.uint8)
    return QuantizedWeight(
        form.format,
        codes,
        _scales(form.scales, of_groups),
        zeros if form.zeros else None,
        torch.rand(before) + 0.5 if form.factors else None,
        torch.randperm(inputs) if ordered else None,
    )


def _scales(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype == torch.float8_e8m0fnu:
        exponents = torch.randint(120, 128, shape)
        exponents[..., :1] = 0
        return exponents.to(torch.uint8).view(dtype)
    smallest = {torch.float8_e4m3fn: 2.0**-9, torch.float16: 2.0**-20}.get(dtype, 1e-3)
    scales = torch.rand(shape)
    scales[..., :1] *= smallest
    return scales.clamp_(min=smallest).to(dtype)
