"""The activations between the projections of an MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.activation_kind import ALPHA, GELU_TANH, KINDS, SILU, UNGATED, Activation, ActivationKind

__all__ = ("ALPHA", "GELU_TANH", "KINDS", "SILU", "Activation", "ActivationKind", "activated", "gated")


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each number, by plain torch. ValueError for a kind that needs a gate."""
    match activation.kind:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x).square()
        case "clamped_swiglu" | "scaled_silu":
            raise ValueError(f"activation is {activation.kind}; allowed without a gate: {', '.join(UNGATED)}")


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activated gate times the up projection, by plain torch."""
    if activation.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=activation.number), up.clamp(-activation.number, activation.number)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    if activation.kind == "scaled_silu":
        return F.silu(gate * activation.number) * up
    return activated(gate, activation) * up
