"""Matmul with weights that are laid out once as the kernels read them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_kernels.activation_kind import GATED, UNGATED, Activation
from baton_kernels.activation_kind import KINDS as ACTIVATIONS
from baton_kernels.cpu.library import KINDS, Native, native
from baton_kernels.cpu.packing import NativeMatrix, PackedMatrix, fits
from baton_kernels.quantized import QuantizedWeight

WORD = 4
"""The bytes of a word of packed numbers."""


class NativeActivation(ctypes.Structure):
    """An activation as the kernels read it."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_float))

    @classmethod
    def of(cls, activation: Activation | None) -> NativeActivation:
        """The activation's; None: one that changes nothing."""
        if activation is None:
            return cls()
        return cls(1 + ACTIVATIONS.index(activation.kind), activation.number)


class NativeProjection(ctypes.Structure):
    """A packed weight, its sizes and what follows its product."""

    _fields_ = (
        ("matrix", NativeMatrix),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("gated", ctypes.c_int),
        ("activation", NativeActivation),
    )


class PackedWeight:
    """A weight [outputs, inputs] as the kernels read it.

    ``gated``: the weight is two of [outputs / 2, inputs], and the product is the activated first half's times
    the second half's. Otherwise an ``activation`` is applied to each output.
    """

    def __init__(
        self,
        kernels: Native,
        weight: Tensor | QuantizedWeight,
        dtype: torch.dtype,
        bias: Tensor | None,
        gated: bool,
        activation: Activation | None,
        is_last: bool = False,
    ) -> None:
        self._kernels = kernels
        self.dtype = dtype
        rows, self.inputs = weight.shape
        self.outputs = rows // 2 if gated else rows
        self._matrix = PackedMatrix(kernels, weight, bias, dtype, gated=gated, is_last=is_last)
        self.native = NativeProjection(
            matrix=self._matrix.native,
            inputs=self.inputs,
            outputs=self.outputs,
            gated=gated,
            activation=NativeActivation.of(activation),
        )

    @classmethod
    def of(
        cls,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        dtype: torch.dtype | None = None,
        activation: Activation | None = None,
        is_last: bool = False,
    ) -> PackedWeight | None:
        """The packed weight; None if plain torch has to multiply it: on another device, of another type,
        without kernels, with an odd number of inputs in all or in a group.

        ``dtype``: the type of the activations; None: the weight's own, which quantized weights do not have.
        ``is_last``: nobody reads the weight afterwards; its memory is given back, and what it held is lost.
        ValueError for an ``activation`` that does not go with ``gated``."""
        if activation is None if gated else activation is not None and activation.kind in GATED:
            raise ValueError(f"activation is {activation}; allowed with gated={gated}: " + _allowed(gated))
        kernels = kernels_for(weight.device, activations_type(weight, dtype)) if fits(weight) else None
        if kernels is None:
            return None
        return cls(kernels, weight, activations_type(weight, dtype), bias, gated, activation, is_last)

    @property
    def nbytes(self) -> int:
        """The memory that the packed weight takes, in bytes."""
        return self._matrix.nbytes

    @property
    def has_rows(self) -> bool:
        """Whether ``rows`` finds the weight's rows: it is plain, and its outputs lie in order."""
        return self._matrix.holds_rows

    def rows(self, indices: Tensor) -> Tensor:
        """The weight's rows at ``indices`` [...] int64 -> [..., inputs]. IndexError for one that is not
        there."""
        assert self.has_rows
        flat = indices.reshape(-1).long().contiguous()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.outputs:
            raise IndexError(f"rows {int(flat.min())} to {int(flat.max())}; allowed: 0 to {self.outputs - 1}")
        packed = self._matrix.packed
        found = torch.empty((len(flat), self.inputs), dtype=packed.dtype)
        steps = self.inputs * found.itemsize // WORD
        self._kernels.packed_rows(packed.data_ptr(), steps, flat.data_ptr(), len(flat), found.data_ptr())
        return found.view(*indices.shape, self.inputs)

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, inputs] of the type that the weight was packed for -> [T, outputs], of ``out_dtype`` (None:
        the type of x)."""
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"{tuple(x.shape)} {x.dtype}: rows of {self.inputs} {self.dtype} are allowed")
        x = x.contiguous()
        out = torch.empty((x.shape[0], self.outputs), dtype=out_dtype or x.dtype)
        self._kernels.linear(
            KINDS[x.dtype],
            KINDS[out.dtype],
            ctypes.addressof(self.native),
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def activations_type(weight: Tensor | QuantizedWeight, dtype: torch.dtype | None) -> torch.dtype:
    """The type of the activations that are multiplied with a weight, if ``dtype`` is None the weight's own.
    ValueError for a quantized weight without a type."""
    if dtype is not None:
        return dtype
    if isinstance(weight, QuantizedWeight):
        raise ValueError("dtype is None; allowed for a quantized weight: the type of the activations")
    return weight.dtype


def kernels_for(device: torch.device, dtype: torch.dtype) -> Native | None:
    """The kernels that multiply activations of this type on ``device``. None: plain torch."""
    return native() if device.type == "cpu" and dtype in KINDS else None


def _allowed(gated: bool) -> str:
    return ", ".join(ACTIVATIONS) if gated else ", ".join(("None", *UNGATED))
