"""The kinds of activations. Imports no torch: a model's config is read without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ActivationKind = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2", "scaled_silu"]
KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)
GATED: tuple[ActivationKind, ...] = ("clamped_swiglu", "scaled_silu")
"""The kinds that are of gated projections alone."""
UNGATED = tuple(kind for kind in KINDS if kind not in GATED)
ALPHA = 1.702
"""The steepness of the sigmoid of ``clamped_swiglu``."""


@dataclass(frozen=True, slots=True)
class Activation:
    """silu: x sigmoid(x). gelu_tanh: the GELU by tanh. relu2: max(x, 0)^2. Of gated projections alone:
    clamped_swiglu (gpt-oss), min(gate, n) sigmoid(1.702 min(gate, n)) (clamp(up, -n, n) + 1), where n is the
    number; scaled_silu (Falcon-H1), the silu of n times the gate, times up."""

    kind: ActivationKind
    number: float = 0.0
    """The bound of ``clamped_swiglu``, the factor of ``scaled_silu``; 0 for the other kinds."""


SILU = Activation("silu")
GELU_TANH = Activation("gelu_tanh")
RELU2 = Activation("relu2")
