"""Matmul with weights that are laid out once as the kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.cpu.library import KINDS, Native, native, pointer

PANEL = 64


class PackedWeight:
    """A weight [outputs, inputs] in panels of 64 outputs: of each panel, 32-bit words [inputs in words, 64].

    ``gated``: the weight is two of [outputs / 2, inputs], and the product is silu of the first half's times
    the second half's.
    """

    def __init__(self, kernels: Native, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        self._kernels = kernels
        self._gated = gated
        rows, self._inputs = weight.shape
        self.outputs = rows // 2 if gated else rows
        self._dtype = weight.dtype
        width = PANEL // 2 if gated else PANEL
        panels = -(-self.outputs // width)
        words = self._inputs * weight.itemsize // 4
        self._packed = torch.empty(panels * words * PANEL, dtype=torch.int32)
        kernels.advise(self._packed.data_ptr(), self._packed.nbytes)
        source, kind = weight.contiguous(), KINDS[weight.dtype]
        kernels.pack(
            kind,
            source.data_ptr(),
            rows,
            self._inputs,
            gated,
            self._packed.data_ptr(),
            torch.get_num_threads(),
        )
        self._bias = None if bias is None else _in_panels(bias.float(), panels, gated)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PackedWeight | None:
        """None if plain torch has to multiply it: on another device, of another type, without kernels."""
        fits = weight.device.type == "cpu" and weight.dtype in KINDS and weight.shape[1] % 2 == 0
        kernels = native() if fits else None
        return None if kernels is None else cls(kernels, weight, bias, gated)

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, inputs] of the weight's type -> [T, outputs], of ``out_dtype`` (None: of x's type)."""
        if x.dtype != self._dtype or x.dim() != 2 or x.shape[1] != self._inputs:
            raise ValueError(f"{tuple(x.shape)} {x.dtype}: rows of {self._inputs} {self._dtype} are allowed")
        x = x.contiguous()
        out = torch.empty((x.shape[0], self.outputs), dtype=out_dtype or x.dtype)
        self._kernels.linear(
            KINDS[x.dtype],
            KINDS[out.dtype],
            x.data_ptr(),
            self._packed.data_ptr(),
            pointer(self._bias),
            out.data_ptr(),
            x.shape[0],
            self._inputs,
            self.outputs,
            self._gated,
            torch.get_num_threads(),
        )
        return out


def _in_panels(bias: Tensor, panels: int, gated: bool) -> Tensor:
    """[panels * 64] float32 in the order of the panels' columns."""
    if not gated:
        return torch.nn.functional.pad(bias, (0, panels * PANEL - len(bias)))
    half = PANEL // 2
    halves = torch.nn.functional.pad(bias.view(2, -1), (0, panels * half - len(bias) // 2))
    return halves.view(2, panels, half).transpose(0, 1).reshape(-1).contiguous()
