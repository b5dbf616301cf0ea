"""Weights kept in fewer bits than they are computed with: codes, and scales for groups of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.code_formats import HALF_BYTE_FORMATS, CodeFormat, Rounding

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of fp4 by the three low bits of their codes; the fourth bit is the sign."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [rows, inputs], or one of each expert [E, rows, inputs]. The inputs of a row are in groups of
    equal size; an element is about (its code - its group's zero point) * its group's scale * its row's
    factor."""

    format: CodeFormat
    codes: Tensor
    """[..., rows, inputs] int8 or float8_e4m3fn; [..., rows, inputs / 2] uint8 for formats of half a byte."""
    scales: Tensor
    """[..., rows, groups]: float32, bfloat16, float16, float8_e4m3fn or float8_e8m0fnu."""
    zeros: Tensor | None = None
    """[..., rows, groups]: the zero points, of int8 codes int8, of int4 codes uint8; None: none."""
    factors: Tensor | None = None
    """[..., rows] float32; None: 1."""
    order: Tensor | None = None
    """[inputs] int64: column i of the codes is multiplied with input ``order[i]``; None: with input i."""
    rounding: Rounding = "none"
    """What a device with units for such products does to activations first; a CPU leaves them as they are."""
    input_scale: Tensor | None = None
    """[] float32: the scale of "fp8-tensor"."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight that the codes stand for."""
        *before, columns = self.codes.shape
        return torch.Size((*before, columns * 2 if self.format in HALF_BYTE_FORMATS else columns))

    @property
    def group(self) -> int:
        """The inputs that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """The memory that the weight takes, in bytes."""
        parts = (self.codes, self.scales, self.zeros, self.factors, self.order, self.input_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def of_expert(self, expert: int) -> QuantizedWeight:
        """The weight of one of the experts."""
        zeros, factors = self.zeros, self.factors
        return replace(
            self,
            codes=self.codes[expert],
            scales=self.scales[expert],
            zeros=None if zeros is None else zeros[expert],
            factors=None if factors is None else factors[expert],
        )

    def values(self) -> Tensor:
        """What the codes stand for, without zero points and scales: float32 of ``shape``, in the order of the
        codes."""
        if self.format == "fp4":
            return _fp4_values(halves(self.codes))
        if self.format == "int4":
            return halves(self.codes).float() - (8 if self.zeros is None else 0)
        return self.codes.float()

    def dequantized(self) -> Tensor:
        """The weight as float32 of ``shape``, in the order of the inputs."""
        shape = self.shape
        values = self.values().view(*self.scales.shape, -1)
        if self.zeros is not None:
            values -= self.zeros.float().unsqueeze(-1)
        scales = self.scales.float()
        if self.factors is not None:
            scales = scales * self.factors.unsqueeze(-1)
        values *= scales.unsqueeze(-1)
        values = values.view(shape)
        if self.order is None:
            return values
        in_order = torch.empty_like(values)
        in_order[..., self.order] = values
        return in_order


def halves(codes: Tensor) -> Tensor:
    """[..., n] uint8 -> [..., 2 n] uint8: the low and the high half of each byte."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def joined(codes: Tensor) -> Tensor:
    """[..., 2 n] uint8, each of at most 15 -> [..., n] uint8: two codes in each byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _fp4_values(codes: Tensor) -> Tensor:
    magnitudes = torch.tensor(FP4_VALUES, device=codes.device)
    return torch.cat((magnitudes, -magnitudes))[codes.int()]
