"""The activations between the projections of an MLP, for the kernels that compute them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """See ``baton_kernels.activation.gated``. float32. NaN stays NaN."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        slope = 1.702
    elif ACTIVATION == "gelu_tanh":
        # x (1 + tanh(u)) / 2 = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
    else:
        tl.static_assert(ACTIVATION == "silu")
        slope = 1.0
    return gate / (1.0 + tl.exp(-slope * gate)) * up
