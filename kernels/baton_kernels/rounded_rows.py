"""Activations rounded to eight bits, for devices that multiply such numbers with weights of eight bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baton_kernels.quantized import QuantizedWeight

RoundedType = Literal["fp8", "int8"]
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""The magnitude that the largest number of a row or group becomes."""
_NEEDED: dict[str, RoundedType] = {
    "fp8-row": "fp8",
    "fp8-tensor": "fp8",
    "fp8-group": "fp8",
    "int8-row": "int8",
}


@dataclass(frozen=True, slots=True)
class RowRounding:
    """A way to round rows [T, inputs]: each number is divided by its scale and becomes the nearest one of the
    type, ties to even. Numbers of fp8 saturate."""

    type: RoundedType
    group: int = 0
    """The inputs of a row that share a scale; 0: all."""
    scale: Tensor | None = None
    """[] float32: the scale of all rows; None: the largest magnitude of a row or group becomes that of the
    type, and a group of zeros has the scale 1."""

    @classmethod
    def of(cls, weight: QuantizedWeight) -> RowRounding | None:
        """The rounding that a weight asks for; None: none. ValueError if it does not fit the weight."""
        rounding = weight.rounding
        if rounding == "none":
            return None
        needed = _NEEDED[rounding]
        if weight.format != needed or weight.zeros is not None or weight.order is not None:
            raise ValueError(
                f"rounding is {rounding} for a weight of {weight.format}; allowed: {needed} without zero "
                "points and order"
            )
        if (rounding == "fp8-tensor") != (weight.input_scale is not None):
            raise ValueError(f"input_scale is {weight.input_scale}; allowed: a number for fp8-tensor alone")
        return cls(needed, weight.group if rounding == "fp8-group" else 0, weight.input_scale)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.type == "int8" else torch.float8_e4m3fn

    def groups(self, inputs: int) -> int:
        """The scales of a row. ValueError if groups do not divide it."""
        if self.group and inputs % self.group:
            raise ValueError(f"rows are of {inputs} inputs; allowed: whole groups of {self.group}")
        return inputs // self.group if self.group else 1


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows [T, inputs]: an element is about its code times its group's scale."""

    codes: Tensor
    """[T, inputs] float8_e4m3fn or int8."""
    scales: Tensor
    """[T, groups] float32."""

    def dequantized(self) -> Tensor:
        """The rows as float32."""
        grouped = self.codes.float().view(*self.scales.shape, -1)
        return (grouped * self.scales[..., None]).view(self.codes.shape)


def round_rows(x: Tensor, rounding: RowRounding) -> RoundedRows:
    """x [T, inputs] rounded by plain torch."""
    grouped = x.float().reshape(len(x), rounding.groups(x.shape[1]), -1)
    largest = LARGEST[rounding.type]
    if rounding.scale is None:
        peak = grouped.abs().amax(-1)
        scales = torch.where(peak == 0, 1.0, peak / largest)
    else:
        scales = rounding.scale.expand(grouped.shape[:2]).contiguous()
    codes = (grouped / scales[..., None]).clamp(-largest, largest).flatten(1)
    if rounding.type == "int8":
        codes = codes.round()
    return RoundedRows(codes.to(rounding.dtype), scales)
