"""Random weights in the forms that checkpoints have, to measure kernels with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from baton_kernels.code_formats import HALF_BYTE_FORMATS, CodeFormat
from baton_kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Form:
    """One way to keep a weight."""

    format: CodeFormat
    group: int | None = None
    """The inputs of a group; None: a row is one."""
    scales: torch.dtype = torch.float32
    zeros: bool = False

    def random(self, *shape: int) -> QuantizedWeight:
        """A weight of this shape, [..., rows, inputs], of random codes."""
        *before, inputs = shape
        columns = inputs // 2 if self.format in HALF_BYTE_FORMATS else inputs
        of_groups = (*before, inputs // (self.group or inputs))
        codes = torch.randint(0, 127, (*before, columns), dtype=torch.uint8)
        codes = codes.view(_CODES.get(self.format, torch.uint8))
        if self.scales == torch.float8_e8m0fnu:
            scales = torch.full(of_groups, 120, dtype=torch.uint8).view(self.scales)
        else:
            scales = (0.01 + 0.01 * torch.rand(of_groups)).to(self.scales)
        zeros = torch.full(of_groups, 7, dtype=torch.uint8) if self.zeros else None
        return QuantizedWeight(self.format, codes, scales, zeros)


_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

FORMS: Mapping[str, Form] = {
    "int8": Form("int8"),
    "fp8": Form("fp8"),
    "fp8-block": Form("fp8", 128),
    "int4": Form("int4", 128, torch.float16),
    "int4-32": Form("int4", 32, torch.float16),
    "int4-zeros": Form("int4", 128, torch.float16, zeros=True),
    "mxfp4": Form("fp4", 32, torch.float8_e8m0fnu),
    "nvfp4": Form("fp4", 16, torch.float8_e4m3fn),
}
"""Names of the forms. int4 and its zero points are GPTQ's and AWQ's, in groups of 128."""
