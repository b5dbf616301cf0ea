"""The weights of experts, as plain tensors or quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations that are multiplied with the weights."""
        return self.down.dtype


@dataclass(frozen=True, slots=True)
class QuantizedExpertTensors:
    """:class:`ExpertTensors` whose weights are quantized."""

    gate_up: QuantizedWeight
    down: QuantizedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    dtype: torch.dtype
    """The type of the activations that are multiplied with the weights."""

    @property
    def is_gated(self) -> bool:
        """Whether the experts have gates."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]

    def of_expert(self, expert: int) -> ExpertTensors:
        """One of the experts, dequantized."""

        def only(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else bias[expert, None]

        gate_up, down = (
            weight.of_expert(expert).dequantized().to(self.dtype)[None]
            for weight in (self.gate_up, self.down)
        )
        return ExpertTensors(gate_up, down, only(self.gate_up_bias), only(self.down_bias), self.activation)
