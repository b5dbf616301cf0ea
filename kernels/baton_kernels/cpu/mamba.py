"""Mamba-2 by the CPU's kernels."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import torch
from torch import Tensor

from baton_kernels.cpu.causal_conv import StateTables, Taps, UnitCells, kernels_of
from baton_kernels.cpu.library import KINDS, pointer
from baton_kernels.cpu.linear import kernels_for
from baton_kernels.mamba_sizes import MambaSizes
from baton_kernels.paged import StateRows
from baton_kernels.state_pages import LayerStates

MOST_DT = 3e38
"""A limit that is none: the kernels compute with finite numbers."""
SHORT = 4
"""The longest run of a prompt's rows that is computed row by row, over its target."""
_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeMamba(ctypes.Structure):
    """The addresses and sizes of a layer."""

    _fields_ = (
        ("cells", UnitCells),
        *((name, _COUNT) for name in ("heads", "head_dim", "groups", "unit_groups", "state_dim")),
        ("conv", Taps),
        *((name, _POINTER) for name in ("a_log", "d", "dt_bias")),
        *((name, _FLOAT) for name in ("least_dt", "most_dt")),
    )

    @classmethod
    def of(
        cls, weights: Weights, dt_limits: tuple[float, float], sizes: MambaSizes, states: LayerStates
    ) -> NativeMamba:
        """The layer's; it does not keep its weights and the pages."""
        conv, bias, *of_heads = weights
        return cls(
            cells=UnitCells.of(states),
            heads=sizes.heads,
            head_dim=sizes.head_dim,
            groups=sizes.groups,
            unit_groups=sizes.unit_groups,
            state_dim=sizes.state_dim,
            conv=Taps.of(conv, bias),
            **{name: t.data_ptr() for name, t in zip(("a_log", "d", "dt_bias"), of_heads, strict=True)},
            least_dt=dt_limits[0],
            most_dt=min(dt_limits[1], MOST_DT),
        )


class NativeGatedNorm(ctypes.Structure):
    """The norm of a layer's output."""

    _fields_ = (
        ("weight", _POINTER),
        ("squares", _POINTER),
        ("groups", _COUNT),
        ("size", _COUNT),
        ("eps", _FLOAT),
        ("gate_first", ctypes.c_int),
    )


Weights: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]
"""The convolution's weight and bias, a_log, d and dt_bias."""


def mamba(
    projected: Tensor,
    weights: Weights,
    dt_limits: tuple[float, float],
    sizes: MambaSizes,
    states: LayerStates,
    rows: StateRows,
) -> Tensor | None:
    """See ``baton_kernels.mamba.mamba``; None if plain torch has to compute."""
    kernels = kernels_of(states, rows, len(projected))
    if kernels is None:
        return None
    projected, threads = projected.contiguous(), torch.get_num_threads()
    out = torch.empty((len(projected), sizes.inner))
    layer = NativeMamba.of(weights, dt_limits, sizes, states)
    address = ctypes.addressof(layer)

    def decode(row: int, sources: Tensor, targets: Tensor) -> None:
        tables, count = StateTables.of(sources, targets), len(targets)
        mixed = torch.empty(count * sizes.units * sizes.unit_channels)
        steps = torch.empty(count * 2 * sizes.units * sizes.heads)
        ends = mixed.data_ptr(), steps.data_ptr(), out[row].data_ptr(), threads
        kernels.mamba_decode(address, ctypes.addressof(tables), projected[row].data_ptr(), *ends)

    if len(rows.decode_targets):
        decode(0, rows.decode_sources, rows.decode_targets)
    for segment in rows.segments:
        if segment.length <= SHORT:
            targets = segment.target.expand(segment.length, -1).contiguous()
            decode(segment.start, segment.source[None], targets)
            continue
        own = torch.empty(kernels.mamba_memory(address, segment.length, threads))
        pages = segment.source.data_ptr(), segment.target.data_ptr()
        first, to = projected[segment.start].data_ptr(), out[segment.start].data_ptr()
        kernels.mamba_prefill(address, *pages, first, segment.length, own.data_ptr(), to, threads)
    return out


def gated_norm(
    y: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    size: int,
    gate_first: bool,
    dtype: torch.dtype,
    squares: Tensor | None,
) -> Tensor | None:
    """See ``baton_kernels.mamba.gated_norm``; None if plain torch has to compute."""
    kernels = kernels_for(y.device, dtype)
    if kernels is None or gate.stride(-1) != 1:
        return None
    y, out = y.contiguous(), torch.empty(y.shape, dtype=dtype)
    squares = None if squares is None else squares.contiguous()
    norm = NativeGatedNorm(pointer(weight), pointer(squares), groups, size, eps, gate_first)
    kernels.gated_norm(
        KINDS[dtype],
        ctypes.addressof(norm),
        y.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        *y.shape,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
