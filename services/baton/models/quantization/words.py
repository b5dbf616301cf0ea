"""Codes in words of 32 bits, and what stands beside them, in tensors [inputs, outputs], as GPTQ and AWQ
publish them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.quantization.stored import MatrixShape, ScaleForm, TensorForm, finite
from baton_kernels.quantized import halves


def codes_in(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 -> [..., n * 32 / bits] uint8: the 4 or 8 bits of each code in a word, the lowest
    first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else halves(octets)


def from_middle(codes: Tensor, bits: int) -> Tensor:
    """Codes of 8 bits as int8, 0 where they are 128; codes of 4 bits as they are."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes


def words_of(count: int, bits: int) -> int:
    """The words that so many codes take."""
    return -(-count * bits // 32)


def groups_of(inputs: range, group: int | None) -> slice:
    """The groups of these inputs. None: there is one."""
    return slice(0, 1) if group is None else slice(inputs.start // group, -(-inputs.stop // group))


def count_groups(matrix: MatrixShape, group: int | None) -> int:
    """The groups of each row of the matrix."""
    return 1 if group is None else -(-matrix.inputs // group)


class WordForm(TensorForm):
    """Words of 32 bits."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.int32,)


@dataclass(frozen=True)
class ZeroWords(WordForm):
    """Zero points [groups, outputs in words], in the order of the outputs."""

    bits: int
    group: int | None

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((count_groups(matrix, self.group), words_of(matrix.rows, self.bits)))

    @abstractmethod
    def codes(self, words: Tensor) -> Tensor:
        """[groups, words] int32 -> [groups, outputs] uint8."""

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        codes = self.codes(found[groups_of(inputs, self.group)])
        return from_middle(codes[:, rows].mT, self.bits)


@dataclass(frozen=True)
class MiddleZeros(WordForm):
    """Zero points of symmetric weights, which are all in the middle of the codes."""

    zeros: ZeroWords
    field: str
    """The name and value of the field of the config that says so."""

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return self.zeros.shape(matrix)

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        middle = 1 << self.zeros.bits - 1
        read = self.zeros.read(found, rows, inputs)
        if (read != (0 if read.dtype == torch.int8 else middle)).any():
            raise ValueError(f"a zero point is not {middle}; allowed where {self.field}: {middle}")
        return read


@dataclass(frozen=True)
class ColumnScales(ScaleForm):
    """Scales [groups, outputs], kept as float16."""

    group: int | None

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((count_groups(matrix, self.group), matrix.rows))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        scales = finite(found[groups_of(inputs, self.group)][:, rows].mT)
        kept = scales.half()
        if (kept != scales).any():
            raise ValueError("a scale is no number of float16; allowed: numbers of float16")
        return kept
