"""Linear attention by the CPU's kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_kernels.cpu.checks import check_states
from baton_kernels.cpu.library import KINDS, native, pointer
from baton_kernels.delta_layer import DeltaInputs, DeltaLayer
from baton_kernels.paged import StateRows, StateSegment
from baton_kernels.state_pages import LayerStates

COLUMNS = 32
"""Value dimensions are a multiple of this."""
LANES = 16
"""Key dimensions are a multiple of this."""
_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _L) for name in ("key_heads", "shared", "key_dim", "value_dim", "taps")),
        *((name, _P) for name in ("conv", "a_log", "dt_bias", "norm")),
        *((name, _F) for name in ("eps", "scale", "lower_bound")),
        *((name, _I) for name in ("by_channel", "unit_vectors", "sigmoid")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (("at", _P), ("stride", _L))


class _Segment(ctypes.Structure):
    _fields_ = (("start", _L), ("length", _L), ("source", _P), ("target", _P))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("qkv", "decay", "beta", "gate")),
        *((name, _P) for name in ("out", "pages")),
        *((name, _L) for name in ("page", "per_page", "first", "size", "width")),
        *((name, _P) for name in ("sources", "targets")),
        *((name, _L) for name in ("decodes", "queries")),
        ("segments", ctypes.POINTER(_Segment)),
        ("num_segments", _L),
    )


def linear_attention(
    layer: DeltaLayer, inputs: DeltaInputs, states: LayerStates, rows: StateRows
) -> Tensor | None:
    """See ``baton_kernels.delta_rule.linear_attention``; None, and nothing done, for inputs that the kernels
    do not take."""
    kind = KINDS.get(inputs.qkv.dtype)
    fits = layer.value_dim % COLUMNS == 0 and layer.key_dim % LANES == 0
    kernels = native() if fits and kind is not None else None
    if kernels is None or kind is None:
        return None
    check_states(states, rows, len(inputs.qkv))
    out = inputs.qkv.new_empty((len(inputs.qkv), layer.value_heads * layer.value_dim))
    native_layer = _layer(layer, inputs)
    step, tables = _step(inputs, out, states, rows)
    kernels.delta(kind, ctypes.addressof(native_layer), ctypes.addressof(step), torch.get_num_threads())
    del tables
    return out


def _layer(layer: DeltaLayer, inputs: DeltaInputs) -> _Layer:
    by_channel = inputs.decay is not None and inputs.decay.shape[1] != layer.value_heads
    return _Layer(
        key_heads=layer.key_heads,
        shared=layer.shared,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        taps=layer.taps,
        conv=pointer(layer.conv),
        a_log=layer.a_log.data_ptr(),
        dt_bias=pointer(layer.dt_bias),
        norm=pointer(layer.norm),
        eps=layer.eps,
        scale=layer.query_scale,
        lower_bound=layer.lower_bound or 0.0,
        by_channel=by_channel,
        unit_vectors=layer.unit_vectors,
        sigmoid=layer.gate == "sigmoid",
    )


def _step(
    inputs: DeltaInputs, out: Tensor, states: LayerStates, rows: StateRows
) -> tuple[_Step, list[Tensor]]:
    """The step, and the tensors that it points to."""
    group, kv = states.group, states.kv
    sources, targets = rows.decode_sources.contiguous(), rows.decode_targets.contiguous()
    tables = [sources, targets]
    segments = (_Segment * len(rows.segments))(*(_segment(one, tables) for one in rows.segments))
    step = _Step(
        qkv=_rows(inputs.qkv),
        decay=_rows(inputs.decay),
        beta=_rows(inputs.beta),
        gate=_rows(inputs.gate),
        out=out.data_ptr(),
        pages=states.pages.data_ptr(),
        page=states.pages.stride(0),
        per_page=group.per_page,
        first=states.layer * kv.units,
        size=kv.size,
        width=len(group.tables),
        sources=sources.data_ptr(),
        targets=targets.data_ptr(),
        decodes=len(sources),
        queries=len(targets) // max(1, len(sources)),
        segments=segments,
        num_segments=len(segments),
    )
    return step, tables


def _segment(segment: StateSegment, tables: list[Tensor]) -> _Segment:
    source, target = segment.source.contiguous(), segment.target.contiguous()
    tables += source, target
    return _Segment(segment.start, segment.length, source.data_ptr(), target.data_ptr())


def _rows(tensor: Tensor | None) -> _Rows:
    if tensor is None:
        return _Rows()
    if tensor.stride(1) != 1:
        raise ValueError(f"strides {tensor.stride()}: the numbers of a row lie side by side")
    return _Rows(tensor.data_ptr(), tensor.stride(0))
