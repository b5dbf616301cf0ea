"""Mixtures of experts by the CPU's kernels: the choice of experts, and their MLPs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_kernels.activation_kind import Activation
from baton_kernels.cpu.library import KINDS, Native, pointer
from baton_kernels.cpu.linear import NativeActivation, activations_type, kernels_for
from baton_kernels.cpu.packing import NativeMatrix, PackedMatrix, fits
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


class NativeExperts(ctypes.Structure):
    """The addresses and sizes of packed experts."""

    _fields_ = (
        ("gate_up", NativeMatrix),
        ("down", NativeMatrix),
        ("activation", NativeActivation),
        *((name, _COUNT) for name in ("experts", "hidden", "inner", "gated")),
    )


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
        experts, self.hidden, self.inner = down.shape
        gated = gate_up.shape[1] == 2 * self.inner
        chosen = _rows_in_order(down, gated)
        self._gate_up = PackedMatrix(kernels, gate_up, gate_up_bias, dtype, gated=gated, chosen=chosen)
        self._down = PackedMatrix(kernels, down, down_bias, dtype, gated=False)
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

        ``dtype``: the type of the activations; None: the weights' own, which quantized weights do not
        have."""
        if not fits(gate_up) or not fits(down) or down.shape[1] % 2:
            return None
        dtype = activations_type(down, dtype)
        kernels = kernels_for(down.device, dtype)
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


def _rows_in_order(down: Tensor | QuantizedWeight, gated: bool) -> Tensor | None:
    """The rows of the gate and up projection in the order in which ``down``'s codes take their products, so
    that these need not be put in order; None: as they are."""
    if isinstance(down, Tensor) or down.order is None:
        return None
    return torch.cat((down.order, down.order + len(down.order))) if gated else down.order
