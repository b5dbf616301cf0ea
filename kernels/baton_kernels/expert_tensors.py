"""The weights of experts as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton_kernels.activation_kind import Activation


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The weights of E experts, or of a rank's ``inner`` rows of each."""

    gate_up: Tensor
    """[E, 2 * inner, hidden]: the gate projection, then the up projection."""
    down: Tensor
    """[E, hidden, inner]."""
    gate_up_bias: Tensor | None
    """[E, 2 * inner]."""
    down_bias: Tensor | None
    """[E, hidden]."""
    activation: Activation
