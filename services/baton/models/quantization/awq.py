"""Weights as AWQ publishes them (https://arxiv.org/abs/2306.00978): words of codes of neighbouring outputs,
in an order of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.quantization.stored import MatrixShape, OnlyChecked, StoredTensor, StoredWeight
from baton.models.quantization.weight_spec import WeightSpec
from baton.models.quantization.words import (
    ColumnScales,
    MiddleZeros,
    WordForm,
    ZeroWords,
    codes_in,
    words_of,
)
from baton_kernels.quantized import joined

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from its lowest bits, of the code of each of eight neighbouring outputs."""


def tensors(spec: WeightSpec) -> StoredWeight:
    """The tensors of the version "gemm"."""
    zeros = AwqZeros(BITS, spec.group)
    middle = StoredTensor(None, OnlyChecked(MiddleZeros(zeros, "zero_point is false")))
    return {
        "qweight": StoredTensor("codes", OutputWords()),
        "qzeros": StoredTensor("zeros", zeros) if spec.zeros else middle,
        "scales": StoredTensor("scales", ColumnScales(spec.group)),
    }


def _in_order(words: Tensor) -> Tensor:
    """[..., n] int32 -> [..., 8 n] uint8: the codes in the order of the outputs."""
    return codes_in(words, BITS).view(*words.shape, len(PLACES))[..., PLACES].flatten(-2)


@dataclass(frozen=True)
class OutputWords(WordForm):
    """Codes [inputs, outputs in words]."""

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.inputs, words_of(matrix.rows, BITS)))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return joined(_in_order(found[inputs.start : inputs.stop])[:, rows].mT)


@dataclass(frozen=True)
class AwqZeros(ZeroWords):
    """Zero points in the order of the words of codes."""

    def codes(self, words: Tensor) -> Tensor:
        return _in_order(words)
