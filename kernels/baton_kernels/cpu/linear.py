"""Matmul with weights that are laid out once as the kernels read them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_kernels.activation_kind import GATED, UNGATED, Activation
from baton_kernels.activation_kind import KINDS as ACTIVATIONS
from baton_kernels.cpu.library import KINDS, Native, native, pointer
from baton_kernels.quantized import QuantizedWeight

PANEL = 64
WORD = 4


class NativeActivation(ctypes.Structure):
    """An activation as the kernels read it."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_float))

    @classmethod
    def of(cls, activation: Activation | None) -> NativeActivation:
        """The activation's; None: one that changes nothing."""
        if activation is None:
            return cls()
        return cls(1 + ACTIVATIONS.index(activation.kind), activation.number)


class PackedWeight:
    """A weight [outputs, inputs] in panels of 64 outputs. A panel is 32-bit words [inputs in words, 64], or
    int8 in the order in which they become those words.

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
    ) -> None:
        self._kernels = kernels
        self.gated = gated
        self.activation = NativeActivation.of(activation)
        self.dtype = dtype
        source = weight.codes if isinstance(weight, QuantizedWeight) else weight
        rows, self.inputs = source.shape
        self.outputs = rows // 2 if gated else rows
        width = PANEL // 2 if gated else PANEL
        panels = -(-self.outputs // width)
        self.packed = torch.empty(panels * PANEL * self.inputs, dtype=source.dtype)
        kernels.advise(self.packed.data_ptr(), self.packed.nbytes)
        pack = kernels.pack_int8 if isinstance(weight, QuantizedWeight) else kernels.pack
        pack(
            KINDS[dtype],
            source.contiguous().data_ptr(),
            rows,
            self.inputs,
            gated,
            self.packed.data_ptr(),
            torch.get_num_threads(),
        )
        scales = weight.scales if isinstance(weight, QuantizedWeight) else None
        self.scales = None if scales is None else in_panels(scales[:, 0], panels, gated)
        self.bias = None if bias is None else in_panels(bias.float(), panels, gated)

    @classmethod
    def of(
        cls,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        dtype: torch.dtype | None = None,
        activation: Activation | None = None,
    ) -> PackedWeight | None:
        """The packed weight; None if plain torch has to multiply it: on another device, of another type,
        without kernels.

        ``dtype``: the type of the activations; None: the weight's own, which int8 weights do not have.
        ValueError for an ``activation`` that does not go with ``gated``."""
        if activation is None if gated else activation is not None and activation.kind in GATED:
            raise ValueError(f"activation is {activation}; allowed with gated={gated}: " + _allowed(gated))
        values = weight.codes if isinstance(weight, QuantizedWeight) else weight
        dtype = dtype or values.dtype
        fits = values.shape[1] % 2 == 0
        if isinstance(weight, QuantizedWeight) and (weight.format != "int8" or weight.scales.shape[-1] != 1):
            return None
        kernels = kernels_for(values.device, dtype) if fits else None
        return None if kernels is None else cls(kernels, weight, dtype, bias, gated, activation)

    @property
    def nbytes(self) -> int:
        """The memory that the packed weight takes, in bytes."""
        return sum(t.nbytes for t in (self.packed, self.scales, self.bias) if t is not None)

    @property
    def has_rows(self) -> bool:
        """Whether ``rows`` finds the weight's rows: it is plain, and its outputs lie in order."""
        return self.scales is None and not self.gated

    def rows(self, indices: Tensor) -> Tensor:
        """The weight's rows at ``indices`` [...] int64 -> [..., inputs]. IndexError for one that is not
        there."""
        assert self.has_rows
        flat = indices.reshape(-1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.outputs:
            raise IndexError(f"rows {int(flat.min())} to {int(flat.max())}; allowed: 0 to {self.outputs - 1}")
        found = torch.empty((len(flat), self.inputs), dtype=self.packed.dtype)
        steps = self.inputs * found.itemsize // WORD
        self._kernels.packed_rows(self.packed.data_ptr(), steps, flat.data_ptr(), len(flat), found.data_ptr())
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
            x.data_ptr(),
            self.packed.data_ptr(),
            pointer(self.scales),
            pointer(self.bias),
            out.data_ptr(),
            x.shape[0],
            self.inputs,
            self.outputs,
            self.gated,
            self.activation.kind,
            self.activation.number,
            torch.get_num_threads(),
        )
        return out


def kernels_for(device: torch.device, dtype: torch.dtype) -> Native | None:
    """The kernels that multiply activations of this type on ``device``. None: plain torch."""
    return native() if device.type == "cpu" and dtype in KINDS else None


def _allowed(gated: bool) -> str:
    return ", ".join(ACTIVATIONS) if gated else ", ".join(("None", *UNGATED))


def in_panels(of_rows: Tensor, panels: int, gated: bool) -> Tensor:
    """float32, one for each row of the weight -> [panels * 64] in the order of the panels' columns."""
    if not gated:
        return torch.nn.functional.pad(of_rows, (0, panels * PANEL - len(of_rows)))
    half = PANEL // 2
    halves = torch.nn.functional.pad(of_rows.view(2, -1), (0, panels * half - len(of_rows) // 2))
    return halves.view(2, panels, half).transpose(0, 1).reshape(-1).contiguous()
