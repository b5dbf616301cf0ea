"""The activations of an MLP, for the kernels that compute them. float32; NaN stays NaN."""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels.activation_kind import ALPHA

STEEPNESS = tl.constexpr(ALPHA)


@triton.jit
def active(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The activation of x, of a kind that needs no gate; for what overflows in between, its limit."""
    if KIND == "relu2":
        result = tl.where(x > 0.0, x * x, x * 0.0)
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "silu")
        result = x / (1.0 + tl.exp(-x))
    return result


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, number: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The activated gate times up: see ``baton_kernels.activation.gated``."""
    if KIND == "clamped_swiglu":
        # Comparisons, unlike minima, let NaN through.
        gate = tl.where(gate > number, number, gate)
        up = tl.where(up > number, number, tl.where(up < -number, -number, up))
        product = gate / (1.0 + tl.exp(gate * -STEEPNESS)) * (up + 1.0)
    elif KIND == "scaled_silu":
        product = active(gate * number, "silu") * up
    else:
        product = active(gate, KIND) * up
    return product
