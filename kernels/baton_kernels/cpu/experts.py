"""Mixtures of experts by the CPU's kernels: the choice of experts, and their MLPs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_kernels.activation_kind import Activation
from baton_kernels.cpu.library import KINDS, Native, pointer
from baton_kernels.cpu.linear import PANEL, NativeActivation, in_panels, kernels_for, takes
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.routing_rule import SCORES, Routing

MOST_EXPERTS, MOST_CHOSEN = 1024, 64
"""The experts, and the groups or experts to choose, that the kernel of the choice takes at most."""
_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeRouting(ctypes.Structure):
    """A rule of the choice."""

    _fields_ = (
        ("bias", _POINTER),
        *((name, _COUNT) for name in ("experts", "top_k", "groups", "top_groups", "group_best")),
        *((name, _COUNT) for name in ("scores", "renormalize")),
        *((name, _FLOAT) for name in ("least_sum", "scale", "jitter")),
    )

    @classmethod
    def of(cls, routing: Routing, experts: int, bias: Tensor | None) -> NativeRouting:
        """The rule for so many experts; it does not keep the bias [experts] float32."""
        return cls(
            bias=pointer(bias),
            experts=experts,
            top_k=routing.top_k,
            groups=routing.groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
            scores=SCORES.index(routing.scores),
            renormalize=routing.renormalize,
            least_sum=routing.least_sum,
            scale=routing.scale,
            jitter=routing.jitter,
        )


def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """See ``baton_kernels.routing.route``; None for inputs that the kernels do not take."""
    tokens, experts = logits.shape
    kernels = kernels_for(logits.device, torch.float32)
    if kernels is None or experts > MOST_EXPERTS or max(routing.top_k, routing.top_groups) > MOST_CHOSEN:
        return None
    logits = logits.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"a bias {tuple(bias.shape)} for {experts} experts")
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int32)
    weights = torch.empty((tokens, routing.top_k))
    rule = NativeRouting.of(routing, experts, bias)
    kernels.route(
        ctypes.addressof(rule),
        logits.data_ptr(),
        tokens,
        chosen.data_ptr(),
        weights.data_ptr(),
        torch.get_num_threads(),
    )
    return chosen, weights


class _Projection(ctypes.Structure):
    _fields_ = (("packed", _POINTER), ("scales", _POINTER), ("bias", _POINTER))


class NativeExperts(ctypes.Structure):
    """The addresses and sizes of packed experts."""

    _fields_ = (
        ("gate_up", _Projection),
        ("down", _Projection),
        ("activation", NativeActivation),
        *((name, _COUNT) for name in ("experts", "hidden", "inner", "gated")),
    )


class _PackedProjections:
    """A projection [E, rows, inputs] of every expert, each in panels like a ``PackedWeight``'s."""

    def __init__(
        self,
        kernels: Native,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        gated: bool,
    ) -> None:
        source = (weight.codes if isinstance(weight, QuantizedWeight) else weight).contiguous()
        experts, rows, inputs = source.shape
        panels = -(-rows // PANEL) if not gated else -(-rows // 2 // (PANEL // 2))
        self.packed = torch.empty((experts, panels * PANEL * inputs), dtype=source.dtype)
        kernels.advise(self.packed.data_ptr(), self.packed.nbytes)
        pack = kernels.pack_int8 if isinstance(weight, QuantizedWeight) else kernels.pack
        kind, threads = KINDS[dtype], torch.get_num_threads()
        for expert, packed in zip(source, self.packed, strict=True):
            pack(kind, expert.data_ptr(), rows, inputs, gated, packed.data_ptr(), threads)
        self.scales = (
            _each_in_panels(weight.scales[..., 0], panels, gated)
            if isinstance(weight, QuantizedWeight)
            else None
        )
        self.bias = None if bias is None else _each_in_panels(bias.float(), panels, gated)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.packed, self.scales, self.bias) if t is not None)

    @property
    def native(self) -> _Projection:
        return _Projection(self.packed.data_ptr(), pointer(self.scales), pointer(self.bias))


def _each_in_panels(of_rows: Tensor, panels: int, gated: bool) -> Tensor:
    return torch.stack([in_panels(of_expert, panels, gated) for of_expert in of_rows])


class PackedExperts:
    """The weights of E experts, laid out once as the kernels read them."""

    def __init__(
        self,
        kernels: Native,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
    ) -> None:
        self._kernels = kernels
        self._dtype = dtype
        experts, self.hidden, self.inner = _values(down).shape
        gated = _values(gate_up).shape[1] == 2 * self.inner
        self._gate_up = _PackedProjections(kernels, gate_up, gate_up_bias, dtype, gated=gated)
        self._down = _PackedProjections(kernels, down, down_bias, dtype, gated=False)
        self.native = NativeExperts(
            gate_up=self._gate_up.native,
            down=self._down.native,
            activation=NativeActivation.of(activation),
            experts=experts,
            hidden=self.hidden,
            inner=self.inner,
            gated=gated,
        )

    @classmethod
    def of(
        cls,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        *,
        activation: Activation,
        dtype: torch.dtype | None = None,
    ) -> PackedExperts | None:
        """The packed experts of gate_up [E, 2 * inner, hidden] (the gate's rows first) or, without gates,
        [E, inner, hidden], down [E, hidden, inner] and biases [E, rows]; None if plain torch has to multiply
        them: on another device, of another type, without kernels, of an odd size.

        ``dtype``: the type of the activations; None: the weights' own, which int8 weights do not have."""
        values = _values(down)
        dtype = dtype or values.dtype
        fits = values.shape[1] % 2 == 0 and values.shape[2] % 2 == 0
        for weight in (gate_up, down):
            if isinstance(weight, QuantizedWeight) and not takes(weight):
                return None
        kernels = kernels_for(values.device, dtype) if fits else None
        if kernels is None:
            return None
        return cls(kernels, gate_up, down, gate_up_bias, down_bias, activation, dtype)

    @property
    def nbytes(self) -> int:
        """The memory that the packed weights take, in bytes."""
        return self._gate_up.nbytes + self._down.nbytes

    def multiply(self, x: Tensor, experts: Tensor, weights: Tensor, weighs_input: bool) -> Tensor:
        """See ``baton_kernels.experts.loop_over_experts``. A token's result does not depend on others."""
        if x.dtype != self._dtype or x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"{tuple(x.shape)} {x.dtype}: rows of {self.hidden} {self._dtype} are allowed")
        if experts.shape != weights.shape or len(experts) != len(x):
            raise ValueError(f"experts {tuple(experts.shape)}, weights {tuple(weights.shape)}, {len(x)} rows")
        x, experts, weights = x.contiguous(), experts.int().contiguous(), weights.float().contiguous()
        kind, address = KINDS[x.dtype], ctypes.addressof(self.native)
        memory = torch.empty(self._kernels.experts_memory(kind, address, experts.numel()), dtype=torch.uint8)
        out = torch.empty_like(x)
        self._kernels.experts(
            kind,
            address,
            x.data_ptr(),
            experts.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            *experts.shape,
            weighs_input,
            memory.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _values(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.codes if isinstance(weight, QuantizedWeight) else weight
