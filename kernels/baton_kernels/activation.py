"""The activations between the projections of an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

ActivationKind = Literal["silu", "gelu_tanh", "clamped_swiglu"]
KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)
ALPHA = 1.702
"""The steepness of the sigmoid of ``clamped_swiglu``."""


@dataclass(frozen=True, slots=True)
class Activation:
    """silu: x sigmoid(x). gelu_tanh: the GELU by tanh. clamped_swiglu, of gated projections alone (gpt-oss):
    min(gate, limit) sigmoid(1.702 min(gate, limit)) (clamp(up, -limit, limit) + 1)."""

    kind: ActivationKind
    limit: float = 0.0
    """The bound of ``clamped_swiglu``; 0 for the other kinds."""


SILU = Activation("silu")
GELU_TANH = Activation("gelu_tanh")


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each number, by plain torch. ValueError for a kind that needs a gate."""
    match activation.kind:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "clamped_swiglu":
            raise ValueError("activation is clamped_swiglu; allowed without a gate: silu, gelu_tanh")


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activated gate times the up projection, by plain torch."""
    if activation.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    return activated(gate, activation) * up
