"""The kinds of activations. Imports no torch: a model's config is read without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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
