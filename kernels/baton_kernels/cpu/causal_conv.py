"""Causal convolutions by the CPU's kernels, and how kernels find the states of layers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_kernels.cpu.checks import check_states
from baton_kernels.cpu.library import Native, pointer
from baton_kernels.cpu.linear import kernels_for
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class UnitCells(ctypes.Structure):
    """The place of the states of one layer."""

    _fields_ = (
        ("pages", _POINTER),
        *((name, _COUNT) for name in ("stride", "per_page", "size", "first", "units")),
    )

    @classmethod
    def of(cls, states: LayerStates) -> UnitCells:
        """The layer's; it does not keep the pages."""
        kv = states.kv
        return cls(
            pages=states.pages.data_ptr(),
            stride=states.pages.stride(0),
            per_page=states.group.per_page,
            size=kv.size,
            first=states.layer * kv.units,
            units=kv.units,
        )


class StateTables(ctypes.Structure):
    """The pages of the states of decoding sequences."""

    _fields_ = (
        ("sources", _POINTER),
        ("targets", _POINTER),
        *((name, _COUNT) for name in ("sequences", "queries", "width")),
    )

    @classmethod
    def of(cls, sources: Tensor, targets: Tensor) -> StateTables:
        """The tables [sequences, pages] and [rows, pages]; it does not keep them."""
        sequences, width = sources.shape
        queries = len(targets) // sequences
        return cls(sources.data_ptr(), targets.data_ptr(), sequences, queries, width)


class Taps(ctypes.Structure):
    """The weights of a convolution."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("all", _COUNT), ("taps", _COUNT))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Taps:
        """The taps of weight [conv_kernel, channels], which are not kept."""
        rows, channels = weight.shape
        return cls(weight.data_ptr(), pointer(bias), channels, rows - 1)


def kernels_of(states: LayerStates, rows: StateRows, tokens: int) -> Native | None:
    """The kernels for these states of ``tokens`` rows. None: plain torch computes. ValueError for states that
    the kernels would misread."""
    kernels = kernels_for(states.pages.device, torch.float32)
    if kernels is not None:
        check_states(states, rows, tokens)
    return kernels


def short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, states: LayerStates, rows: StateRows
) -> Tensor | None:
    """See ``baton_kernels.causal_conv.short_conv``; None if plain torch has to compute."""
    kernels = kernels_of(states, rows, len(projected))
    if kernels is None:
        return None
    projected = projected.contiguous()
    out = torch.empty((len(projected), weight.shape[1]))
    cells, taps, threads = UnitCells.of(states), Taps.of(weight, bias), torch.get_num_threads()
    own = ctypes.addressof(cells), ctypes.addressof(taps)
    if len(rows.decode_targets):
        tables = StateTables.of(rows.decode_sources, rows.decode_targets)
        ends = projected.data_ptr(), out.data_ptr(), threads
        kernels.short_conv_decode(*own, ctypes.addressof(tables), *ends)
    for segment in rows.segments:
        pages = segment.source.data_ptr(), segment.target.data_ptr()
        run = segment.start, segment.length
        kernels.short_conv_prefill(*own, *pages, *run, projected.data_ptr(), out.data_ptr(), threads)
    return out
