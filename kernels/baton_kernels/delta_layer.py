"""What a layer of linear attention is, and what it reads: see ``baton_kernels.delta_rule``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton_kernels.delta_kinds import GateKind


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The heads of one rank, and their weights besides the projections. All tensors are float32 and
    contiguous."""

    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``; those of one key head follow each other."""
    key_dim: int
    value_dim: int
    a_log: Tensor
    """[value_heads]: the logarithm of the rate r of the decay."""
    dt_bias: Tensor | None = None
    """[value_heads], or [value_heads * key_dim] if decays are of channels: added to the decay's input x."""
    lower_bound: float | None = None
    """None: the decay is exp(-r softplus(x)). A negative number: exp(lower_bound sigmoid(r x)). Without an
    input it is exp(-r) for every token."""
    conv: Tensor | None = None
    """[conv_kernel, channels]: the weights of the convolutions, the oldest input's first, of the queries of
    all heads, the keys and the values. None: there are none."""
    unit_vectors: bool = True
    """Whether queries and keys are made of length 1."""
    query_scale: float = 1.0
    """A factor of the queries behind that."""
    norm: Tensor | None = None
    """[value_dim]: the weight of an RMS norm of each head's output; None: there is none."""
    eps: float = 0.0
    gate: GateKind = "silu"
    """The activation of the gates, which are multiplied with the output behind its norm."""

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def taps(self) -> int:
        """Inputs of the convolutions that are kept."""
        return 0 if self.conv is None else len(self.conv) - 1

    @property
    def unit_channels(self) -> int:
        """Channels of a key head's query, key and values."""
        return 2 * self.key_dim + self.shared * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The projections of a step's T rows, of the activations' type. Rows may lie apart, the numbers of a row
    do not."""

    qkv: Tensor
    """[T, channels]: the queries of all heads, the keys, the values."""
    decay: Tensor | None
    """[T, value_heads], or [T, value_heads * key_dim] if decays are of channels; None: they are
    constant."""
    beta: Tensor | None
    """[T, value_heads]: the logits of beta; None: there is no delta rule."""
    gate: Tensor | None
    """[T, value_heads * value_dim]; None: outputs are not gated."""
