"""All layers of a Llama-like model as one call of the CPU's kernels: in a decode step, calling the layers'
kernels one by one from Python takes a fifth of the time of the kernels themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.library import KINDS, pointer
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.rotary import HeadNorm

_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Projection(ctypes.Structure):
    _fields_ = (
        ("packed", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("inputs", _COUNT),
        ("outputs", _COUNT),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("qkv", _Projection),
        ("o", _Projection),
        ("gate_up", _Projection),
        ("down", _Projection),
        ("window", _COUNT),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("hidden", _COUNT),
        ("heads", _COUNT),
        ("eps", _FLOAT),
        ("head_eps", _FLOAT),
        ("scale", _FLOAT),
    )


class _Run(ctypes.Structure):
    _fields_ = (("start", _COUNT), ("length", _COUNT), ("context", _COUNT), ("table", _POINTER))


class NativeStep(ctypes.Structure):
    """The inputs and outputs of the layers in one step."""

    _fields_ = (
        *((name, _POINTER) for name in ("pool", "shape", "residual", "delta", "scratch", "cos", "sin")),
        *((name, _POINTER) for name in ("blocks", "offsets", "tables", "contexts", "runs", "seconds")),
        *((name, _COUNT) for name in ("tokens", "decodes", "width", "num_runs")),
    )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. The norms' weights have the type of the activations."""

    input_norm: Tensor
    post_norm: Tensor
    head_norm: HeadNorm | None
    qkv: PackedWeight
    o: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    window: int | None


class LayerStack:
    """Layers of the same sizes, of which the first has no layer before it."""

    def __init__(self, layers: Sequence[LayerWeights], *, heads: int, eps: float, scale: float) -> None:
        self._weights = tuple(layers)  # kept: the kernels have their addresses
        first = layers[0]
        self._hidden, self._dtype = len(first.input_norm), first.input_norm.dtype
        self._scratch = self._hidden + first.qkv.outputs + 2 * first.o.inputs + first.down.inputs
        """Numbers per token of the scratch memory of a layer."""
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        head_eps = first.head_norm.eps if first.head_norm else 0.0
        self._stack = _Stack(self._layers, self._hidden, heads, eps, head_eps, scale)

    def run(self, count: int, x: Tensor, pool: Tensor, plan: CpuPlan, cos: Tensor, sin: Tensor) -> Tensor:
        """Runs the first ``count`` layers, at least one. Returns the last one's output for the residual
        stream; the stream, x [T, hidden] in float32, is changed in place.

        cos and sin are [T, 1, head_dim] in float32, as ``baton_kernels.rotary.rotate`` takes them."""
        tokens, batch = len(x), plan.batch
        delta = torch.empty((tokens, self._hidden), dtype=self._dtype)
        scratch = torch.empty(tokens * self._scratch, dtype=self._dtype)
        cos, sin = cos.contiguous(), sin.contiguous()
        runs = (_Run * len(batch.chunks))(
            *(_Run(c.start, c.length, c.context, c.table.data_ptr()) for c in batch.chunks)
        )
        step = NativeStep(
            pool=pool.data_ptr(),
            shape=ctypes.addressof(plan.shape),
            residual=x.data_ptr(),
            delta=delta.data_ptr(),
            scratch=scratch.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            blocks=batch.slot_blocks.data_ptr(),
            offsets=batch.slot_offsets.data_ptr(),
            tables=plan.tables.data_ptr(),
            contexts=batch.decode_contexts.data_ptr(),
            runs=ctypes.addressof(runs),
            seconds=None,
            tokens=tokens,
            decodes=batch.num_decode,
            width=plan.tables.shape[1],
            num_runs=len(batch.chunks),
        )
        kind = KINDS[self._dtype]
        plan.kernels.layers(kind, ctypes.addressof(self._stack), count, ctypes.addressof(step), plan.threads)
        return delta


def _layer(weights: LayerWeights) -> _Layer:
    norm = weights.head_norm
    return _Layer(
        input_norm=weights.input_norm.data_ptr(),
        post_norm=weights.post_norm.data_ptr(),
        q_norm=pointer(norm.q if norm else None),
        k_norm=pointer(norm.k if norm else None),
        qkv=_projection(weights.qkv),
        o=_projection(weights.o),
        gate_up=_projection(weights.gate_up),
        down=_projection(weights.down),
        window=weights.window or 0,
    )


def _projection(weight: PackedWeight) -> _Projection:
    return _Projection(
        pointer(weight.packed), pointer(weight.scales), pointer(weight.bias), weight.inputs, weight.outputs
    )
