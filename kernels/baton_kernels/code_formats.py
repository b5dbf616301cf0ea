"""The formats of codes that stand for weights. Imports no torch: a model's config is read without it."""

from __future__ import annotations

from typing import Literal

CodeFormat = Literal["int8", "fp8", "int4", "fp4"]
"""int8: whole numbers -128 to 127. fp8: e4m3 (OCP 8-bit floating point, 1.0). int4: whole numbers, kept as 0
to 15; without zero points 8 stands for 0. fp4: e2m1 (OCP microscaling formats, 1.0)."""

Rounding = Literal["none", "fp8-row", "fp8-tensor", "fp8-group", "int8-row"]
"""How activations are rounded before they are multiplied: not at all; to fp8 with a scale for each row, for
the whole tensor (``QuantizedWeight.input_scale``), or for each group of inputs of a row; to int8 with a scale
for each row."""

HALF_BYTE_FORMATS: tuple[CodeFormat, ...] = ("int4", "fp4")
"""The formats of which two codes are in a byte: the one of the even column in its low half."""
