"""Tensors of checkpoints that become parts of quantized weights as they are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from baton.models.quantization.base import Index, Place
from baton.models.quantization.weight_spec import WeightSpec

Slot = Literal["codes", "scales", "zeros", "factors", "groups", "input_scale"]
"""The tensors of a ``QuantizedWeight``; groups: the group of each input, which give its order."""


class MatrixShape(NamedTuple):
    """The sizes of a projection in the checkpoint, as far as it is here."""

    rows: int
    inputs: int


class TensorForm(ABC):
    """The form of one tensor in the checkpoint. A form has no state but sizes."""

    @property
    @abstractmethod
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types that the tensor may have."""

    @abstractmethod
    def shape(self, matrix: MatrixShape) -> torch.Size:
        """The tensor's shape; dimensions of size 1 may be missing or added."""

    @abstractmethod
    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        """What ``found`` says of these rows [R] int64 and inputs: what the slot is filled with, or what
        expands to it. ValueError for values that are not allowed."""


@dataclass(frozen=True, slots=True)
class StoredPlace(Place):
    """A part of a slot, and the tensor of the checkpoint that fills it."""

    form: TensorForm
    matrix: MatrixShape
    neutral: Tensor | None
    """What fills the slot of weights that are drawn, or expands to it; None: codes, which are drawn."""
    kept: WeightSpec

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.form.dtypes

    @property
    def shape(self) -> torch.Size:
        return self.form.shape(self.matrix)

    @property
    def spec(self) -> WeightSpec:
        return self.kept

    @property
    def num_matrices(self) -> int:
        return int(self.neutral is None)

    def fits(self, shape: torch.Size, expected: torch.Size) -> bool:
        return [size for size in shape if size != 1] == [size for size in expected if size != 1]

    def load(self, found: Tensor) -> None:
        rows, inputs = self.source
        assert isinstance(inputs, slice)
        columns = range(inputs.start, inputs.stop)
        self.tensor.copy_(self.form.read(found, _numbers(rows, found.device), columns))

    def direct(self, shape: torch.Size) -> None:
        return None

    def draw(self, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> None:
        """Fill the slot with codes that are drawn, or with the number that makes weights of such codes as
        large as drawn ones are."""
        if self.neutral is not None:
            self.tensor.copy_(self.neutral)
            return
        stored = self.form.dtypes[0]
        size = shape.numel() * stored.itemsize
        drawn = torch.randint(256, (size,), dtype=torch.uint8, generator=generator, device=generator.device)
        if stored == torch.float8_e4m3fn:
            drawn.masked_fill_(drawn & 0x7F == 0x7F, 0)  # not a number
        self.load(drawn.view(stored).view(shape))

    def make_neutral(self, norm_offset: float) -> None:
        assert self.neutral is not None
        self.tensor.copy_(self.neutral)


def _numbers(rows: Index, device: torch.device) -> Tensor:
    """The rows one by one."""
    if isinstance(rows, Tensor):
        return rows.to(device)
    return torch.arange(rows.start, rows.stop, device=device)


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint, and what it fills."""

    slot: Slot | None
    """None: nothing; its form is ``OnlyChecked``."""
    form: TensorForm


StoredWeight = Mapping[str, StoredTensor]
"""The tensors that a checkpoint has of a projection, by the ends of their names ("weight_scale")."""


def finite(scales: Tensor) -> Tensor:
    """The scales themselves. ValueError if one is no finite number."""
    if not torch.isfinite(scales.float()).all():
        raise ValueError("a scale is not a finite number; allowed: finite numbers")
    return scales


class ScaleForm(TensorForm):
    """Numbers of any floating point type, or powers of two."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu


@dataclass(frozen=True)
class Codes(TensorForm):
    """Codes of a byte each, [rows, inputs], of the slot's type."""

    dtype: torch.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size(matrix)

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        part = found.view(torch.uint8)[rows][:, inputs.start : inputs.stop].view(self.dtype)
        if self.dtype == torch.float8_e4m3fn and (part.view(torch.uint8) & 0x7F == 0x7F).any():
            raise ValueError("a weight is nan; allowed: numbers")
        return part


@dataclass(frozen=True)
class Blocks:
    """Blocks of ``rows`` outputs and ``group`` inputs. None: all of them."""

    rows: int | None = 1
    group: int | None = None

    def number(self, matrix: MatrixShape) -> torch.Size:
        """The number of blocks, [across the outputs, across the inputs]."""
        across = 1 if self.rows is None else -(-matrix.rows // self.rows)
        return torch.Size((across, 1 if self.group is None else -(-matrix.inputs // self.group)))

    def of(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        """What ``found``, something of each block, says of these rows [R] and inputs, [R, groups]."""
        across = found.reshape(-1, 1) if self.group is None else found.view(-1, found.shape[-1])
        part = across[torch.zeros_like(rows) if self.rows is None else rows // self.rows]
        if self.group is None:
            return part
        return part[:, inputs.start // self.group : -(-inputs.stop // self.group)]


@dataclass(frozen=True)
class GroupScales(ScaleForm):
    """Scales of blocks, [blocks of outputs, blocks of inputs]."""

    blocks: Blocks

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return self.blocks.number(matrix)

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        scales = found.float() if found.itemsize == 1 else found
        return finite(self.blocks.of(scales, rows, inputs))


@dataclass(frozen=True)
class ByteScales(TensorForm):
    """Scales of blocks that are kept as they are: a byte each, of the slot's type or as plain bytes."""

    blocks: Blocks
    dtype: torch.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtype, torch.uint8

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return self.blocks.number(matrix)

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return finite(self.blocks.of(found.view(torch.uint8), rows, inputs).view(self.dtype))


class HalfBytes(TensorForm):
    """Two codes in a byte, [rows, inputs / 2]: that of the even input in the low half."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size((matrix.rows, -(-matrix.inputs // 2)))

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return found[rows, inputs.start // 2 : inputs.stop // 2]


class OneScale(ScaleForm):
    """One number of a projection."""

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return torch.Size(())

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        return finite(found.reshape(()))


class InputScale(OneScale):
    """The one scale of a projection's activations, which are divided by it."""

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        scale = super().read(found, rows, inputs)
        if not scale > 0:
            raise ValueError(f"the scale is {float(scale):g}; allowed: a finite number above 0")
        return scale


@dataclass(frozen=True)
class OnlyChecked(TensorForm):
    """Numbers that are checked like those of another form, and not kept."""

    form: TensorForm

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.form.dtypes

    def shape(self, matrix: MatrixShape) -> torch.Size:
        return self.form.shape(matrix)

    def read(self, found: Tensor, rows: Tensor, inputs: range) -> Tensor:
        self.form.read(found, rows, inputs)
        return found.new_empty(0)
