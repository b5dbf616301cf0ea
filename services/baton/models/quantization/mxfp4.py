"""Experts as gpt-oss publishes them: fp4 in groups of 32 inputs whose scales are powers of two.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.quantization.stored import (
    MatrixShape,
    StoredTensor,
    StoredWeight,
    TensorForm,
    finite,
)
from baton.models.quantization.weight_spec import WeightSpec

GROUP = 32


def tensors(spec: WeightSpec) -> StoredWeight:
    """The codes and their scales."""
    return {
        "blocks": StoredTensor("codes", Blocks()),
        "scales": StoredTensor("scales", PowerScales()),
    }


class OctetForm(TensorForm):
    """Numbers of a byte, without a sign."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)


class Blocks(OctetForm):
    """Codes [rows, groups, bytes of a group]."""

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.rows, -(-matrix.inputs // GROUP), GROUP // 2))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return found[rows, inputs.start // GROUP : inputs.stop // GROUP].flatten(1)


class PowerScales(OctetForm):
    """Scales [rows, groups]: exponents of 2, plus 127."""

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.rows, -(-matrix.inputs // GROUP)))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        part = found[rows, inputs.start // GROUP : inputs.stop // GROUP]
        return finite(part.contiguous().view(torch.float8_e8m0fnu))
