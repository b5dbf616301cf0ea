"""Experts as gpt-oss publishes them: fp4 in groups of 32 inputs whose scales are powers of two.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.quantization.stored import (
    Blocks,
    ByteScales,
    MatrixShape,
    StoredTensor,
    StoredWeight,
    TensorForm,
)
from baton.models.quantization.weight_spec import WeightSpec

GROUP = 32


def tensors(spec: WeightSpec) -> StoredWeight:
    """The codes and their scales."""
    return {
        "blocks": StoredTensor("codes", GroupsOfHalfBytes()),
        "scales": StoredTensor("scales", ByteScales(Blocks(1, GROUP), torch.float8_e8m0fnu)),
    }


class GroupsOfHalfBytes(TensorForm):
    """Two codes in a byte, [rows, groups, bytes of a group]."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.rows, -(-matrix.inputs // GROUP), GROUP // 2))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return found[rows, inputs.start // GROUP : inputs.stop // GROUP].flatten(1)
