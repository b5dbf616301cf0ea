"""The weights of a Mamba-2 layer, as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton_kernels.causal_conv import ConvWeights


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """The weights of a layer behind its projection, of one rank. All float32."""

    conv: ConvWeights
    """The taps of ``MambaSizes.units`` times ``unit_channels``: unit by unit, in the order of its cell."""
    a_log: Tensor
    """[heads of all units]."""
    d: Tensor
    dt_bias: Tensor
    dt_limits: tuple[float, float]
    """The least and the largest dt."""


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """The norm of a layer's output, gated by SiLU: an RMS norm over each group of heads."""

    weight: Tensor | None
    """[numbers] float32; None: there is no norm, the gate alone."""
    eps: float
    groups: int
    """Groups, or parts of groups, that are here."""
    size: int
    """Numbers of a whole group, on all ranks."""
    gate_first: bool
    """Whether the gate multiplies what is normed, not the norm's result."""
