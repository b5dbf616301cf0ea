"""The weights of experts as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton_kernels.activation_kind import Activation
from baton_kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The weights of E experts, or of a rank's ``inner`` rows of each."""

    gate_up: Tensor
    """[E, 2 * inner, hidden]: the gate projection, then the up projection; [E, inner, hidden] of experts that
    have no gate."""
    down: Tensor
    """[E, hidden, inner]."""
    gate_up_bias: Tensor | None
    """[E, rows of ``gate_up``]."""
    down_bias: Tensor | None
    """[E, hidden]."""
    activation: Activation

    @property
    def is_gated(self) -> bool:
        """Whether the experts have gates."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]


@dataclass(frozen=True, slots=True)
class QuantizedExpertTensors:
    """The quantized weights of E experts, or of a rank's ``inner`` rows of each; shapes as in
    ``ExpertTensors``."""

    gate_up: QuantizedWeight
    down: QuantizedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation

    @property
    def is_gated(self) -> bool:
        """Whether the experts have gates."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]
