"""What the weights of matmuls are kept as. Imports no torch, so that a bad option is refused at once."""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["none", "int8"]
"""int8: each row with a scale of its own, multiplied with activations of the model's type."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
