"""Weights laid out as the CPU's kernels read them: in panels of 64 columns, each the products with one row of
the weight."""

from __future__ import annotations

import ctypes
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.code_formats import CodeFormat
from baton_kernels.cpu.library import KINDS, Native, pointer
from baton_kernels.quantized import QuantizedWeight

PANEL = 64
SLAB_BYTES = 8 << 20
"""The size of what is packed before the memory that it was in is given back."""
MOST_OF_GROUP = 256
"""The most inputs of a group; larger groups are divided, and their parts have the same scale."""
FORMATS: tuple[CodeFormat, ...] = get_args(CodeFormat)
"""The formats of codes in the order of their numbers, which begin at 1."""
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu)
"""The types of scales in the order of their numbers."""
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class NativeMatrix(ctypes.Structure):
    """The addresses and the form of a packed weight."""

    _fields_ = (
        *((name, _POINTER) for name in ("packed", "factors", "bias", "scales", "zeros", "order")),
        ("group", _COUNT),
        ("format", ctypes.c_int),
        ("scale_type", ctypes.c_int),
    )


class PackedMatrix:
    """A weight [rows, inputs], or one of each expert [E, rows, inputs], in panels of 64 rows. A panel is
    32-bit words [inputs in words, 64], or codes in the order in which they become those words.

    ``gated``: the rows are two halves, of which a panel has 32 rows each. ``chosen`` [rows] int64: the
    weight's rows in the order in which they are packed; None: as they are. ``bias`` [..., rows]. ``is_last``:
    nobody reads the weight afterwards, so that its memory is given back as it is packed."""

    def __init__(
        self,
        kernels: Native,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        gated: bool,
        chosen: Tensor | None = None,
        is_last: bool = False,
    ) -> None:
        *experts, rows, self.inputs = weight.shape
        count = experts[0] if experts else 1
        self.dtype = dtype
        self._panels = -(-rows // 2 // (PANEL // 2)) if gated else -(-rows // PANEL)
        self._shape, self._gated, self._chosen = (count, rows), gated, chosen
        codes = weight.codes if isinstance(weight, QuantizedWeight) else weight
        columns = self._panels * PANEL * codes.shape[-1]
        self.packed = torch.empty((count, columns), dtype=codes.dtype)
        kernels.advise(self.packed.data_ptr(), self.packed.nbytes)
        self.bias = None if bias is None else self._of_rows(bias.float())
        self.order: Tensor | None = None
        self.factors: Tensor | None = None
        self.scales: Tensor | None = None
        self.zeros: Tensor | None = None
        kind, pack = KINDS[dtype], kernels.pack
        if isinstance(weight, QuantizedWeight):
            kind, pack = 1 + FORMATS.index(weight.format), kernels.pack_codes
            self._take_scales(weight)
        of_panel = PANEL * codes.shape[-1] * codes.itemsize
        slab = PANEL * (-(-SLAB_BYTES // of_panel) if is_last and not gated else self._panels)
        threads = torch.get_num_threads()
        for expert, to in zip(codes.view(count, rows, -1), self.packed, strict=True):
            whole = expert.contiguous() if chosen is None else expert[chosen]
            for source, panels in zip(whole.split(slab), to.split(slab * codes.shape[-1]), strict=True):
                pack(kind, source.data_ptr(), len(source), self.inputs, gated, panels.data_ptr(), threads)
                if is_last:
                    kernels.give_back(source.data_ptr(), source.nbytes)
        self.native = NativeMatrix(
            packed=self.packed.data_ptr(),
            factors=pointer(self.factors),
            bias=pointer(self.bias),
            scales=pointer(self.scales),
            zeros=pointer(self.zeros),
            order=pointer(self.order),
            group=0 if self.scales is None else self.inputs // self.scales.shape[2],
            format=kind if isinstance(weight, QuantizedWeight) else 0,
            scale_type=0 if isinstance(weight, Tensor) else SCALE_TYPES.index(weight.scales.dtype),
        )

    @property
    def nbytes(self) -> int:
        """The memory that the packed weight takes, in bytes."""
        parts = (self.packed, self.factors, self.bias, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def holds_rows(self) -> bool:
        """Whether the weight's own numbers are there, its rows in order."""
        return self.native.format == 0 and not self._gated and self._chosen is None

    def _take_scales(self, weight: QuantizedWeight) -> None:
        """The scale of whole rows becomes part of their factors, which are multiplied last."""
        self.order = None if weight.order is None else weight.order.int()
        factors = weight.scales.new_ones(self._shape, dtype=torch.float32)
        if weight.factors is not None:
            factors *= weight.factors.view(self._shape)
        parts = parts_of_groups(weight)
        if parts == 0:
            factors *= weight.scales.float().view(self._shape)
        else:
            scales = weight.scales
            bits = scales.view(torch.uint8) if scales.itemsize == 1 else scales
            self.scales = self._of_rows(bits, parts)
            if weight.zeros is not None:
                base = 8 if weight.format == "int4" else 0
                self.zeros = self._of_rows((weight.zeros.to(torch.int16) - base).to(torch.int8), parts)
        self.factors = self._of_rows(factors)

    def _of_rows(self, values: Tensor, parts: int = 1) -> Tensor:
        """[..., rows] or [..., rows, groups], each group in so many parts -> [E, panels, groups * parts, 64]
        in the order of the panels' columns."""
        experts, rows = self._shape
        values = values.reshape(experts, rows, -1)
        if self._chosen is not None:
            values = values[:, self._chosen]
        halves = 2 if self._gated else 1
        width, of_half = PANEL // halves, rows // halves
        padding = self._panels * width - of_half
        split = F.pad(values.view(experts, halves, of_half, -1), (0, 0, 0, padding))
        split = split.view(experts, halves, self._panels, width, -1).permute(0, 2, 4, 1, 3)
        in_panels = split.reshape(experts, self._panels, -1, PANEL)
        return in_panels.repeat_interleave(parts, 2) if parts > 1 else in_panels.contiguous()


def parts_of_groups(weight: QuantizedWeight) -> int:
    """The parts that each group is divided into, so that no part has more than ``MOST_OF_GROUP`` inputs; 0:
    rows are whole groups without zero points, of any size. ValueError if there is no such division."""
    if weight.scales.shape[-1] == 1 and weight.zeros is None:
        return 0
    group = weight.group
    for parts in range(1, group // 2 + 1):
        if group % (2 * parts) == 0 and group // parts <= MOST_OF_GROUP:
            return parts
    raise ValueError(f"groups are of {group} inputs; allowed: an even number")


def fits(weight: Tensor | QuantizedWeight) -> bool:
    """Whether there are kernels for the weight's form: words have two inputs, and both are of one group."""
    if weight.shape[-1] % 2:
        return False
    if isinstance(weight, Tensor) or (weight.scales.shape[-1] == 1 and weight.zeros is None):
        return True
    return weight.group % 2 == 0
