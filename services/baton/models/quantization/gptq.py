"""Weights as GPTQ publishes them (https://arxiv.org/abs/2210.17323): words of codes of neighbouring
inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.quantization.stored import MatrixShape, OnlyChecked, StoredTensor, StoredWeight, TensorForm
from baton.models.quantization.weight_spec import WeightSpec
from baton.models.quantization.words import (
    ColumnScales,
    MiddleZeros,
    WordForm,
    ZeroWords,
    codes_in,
    from_middle,
    words_of,
)


def tensors(spec: WeightSpec) -> StoredWeight:
    """The tensors of the format "gptq", whose zero points are stored less 1."""
    return _tensors(spec, less=1)


def tensors_v2(spec: WeightSpec) -> StoredWeight:
    """The tensors of the format "gptq_v2"."""
    return _tensors(spec, less=0)


def _tensors(spec: WeightSpec, less: int) -> StoredWeight:
    bits = 4 if spec.code == "int4" else 8
    zeros = GptqZeros(bits, spec.group, less)
    middle = StoredTensor(None, OnlyChecked(MiddleZeros(zeros, "sym is true")))
    groups = InputGroups(spec.group, spec.ordered)
    return {
        "qweight": StoredTensor("codes", InputWords(bits)),
        "qzeros": StoredTensor("zeros", zeros) if spec.zeros else middle,
        "scales": StoredTensor("scales", ColumnScales(spec.group)),
        "g_idx": StoredTensor("groups", groups) if spec.ordered else StoredTensor(None, OnlyChecked(groups)),
    }


@dataclass(frozen=True)
class InputWords(WordForm):
    """Codes [inputs in words, outputs]."""

    bits: int

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((words_of(matrix.inputs, self.bits), matrix.rows))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        first = inputs.start * self.bits // 32
        words = found[first : words_of(inputs.stop, self.bits)][:, rows].mT
        octets = words.contiguous().view(torch.uint8)
        start, stop = (at * self.bits // 8 - 4 * first for at in (inputs.start, inputs.stop))
        return from_middle(octets[:, start:stop], self.bits)


@dataclass(frozen=True)
class GptqZeros(ZeroWords):
    """Zero points less a number, which is taken from the words as if each were one number: a zero point that
    is smaller borrows from the next."""

    less: int

    def codes(self, words: Tensor) -> Tensor:
        ones = sum(1 << at for at in range(0, 32, self.bits))
        return codes_in(words + self.less * ones, self.bits)


@dataclass(frozen=True)
class InputGroups(TensorForm):
    """The number of each input's group [inputs]. ``ordered``: whether all inputs together may be in groups in
    any order; a part of them has groups of its own, which follow each other."""

    group: int | None
    ordered: bool

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.int32, torch.int64

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.inputs,))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        is_part = len(inputs) < len(found)
        size = self.group or len(found)
        in_order = torch.equal(found.long(), torch.arange(len(found), device=found.device) // size)
        if not in_order and (is_part or not self.ordered):
            where = "in a rank's part of them" if self.ordered else "with this desc_act and group_size"
            raise ValueError(
                f"inputs are in groups in an order of their own; allowed {where}: groups in the order of the "
                "inputs"
            )
        return found[inputs.start : inputs.stop] - inputs.start // size
