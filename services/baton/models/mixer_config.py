"""The sizes of what layers mix tokens by, besides attention over K and V. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_kernels.kv_layout import StateKV, TokenKV

MixerKind = Literal["attention", "latent", "delta", "mamba", "conv"]
"""attention: over K and V. latent: over one latent vector a token (MLA). delta: linear attention by the delta
rule or by decay alone (gated delta nets, Kimi delta attention, lightning attention). mamba: Mamba-2. conv: a
short convolution alone (LFM2)."""
DeltaKind = Literal["gdn", "kda", "lightning"]
STATES: tuple[MixerKind, ...] = ("delta", "mamba", "conv")
"""The mixers that keep a state."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""

    q_rank: int | None
    """Numbers of the queries' latent; None: queries are projected at once."""
    kv_rank: int
    """Numbers of the latent that keys and values are made of."""
    nope_dim: int
    """Dimensions of a query or key head that are not rotated."""
    rope_dim: int
    """Dimensions that are; keys have them in common."""
    value_dim: int
    """Dimensions of a value head."""
    eps: float = 1e-6
    """The epsilon of the norms of both latents."""

    @property
    def query_dim(self) -> int:
        """Dimensions of a query head."""
        return self.nope_dim + self.rope_dim

    def kept(self) -> TokenKV:
        """What a layer keeps: the latent, normed, and the rotated part of the key; on every rank."""
        return TokenKV(1, 1, self.width)

    @property
    def width(self) -> int:
        """Numbers that are kept of a token, which are those of an absorbed query head, too."""
        return self.kv_rank + self.rope_dim

    def expands(self, length: int, context: int) -> bool:
        """Whether a chunk of ``length`` tokens, which sees ``context`` tokens at last, takes fewer
        multiplications with keys and values that are made of the latents than with absorbed queries."""
        made = self.kv_rank * (self.nope_dim + self.value_dim)
        pairs = length * context - length * (length - 1) // 2
        absorbed = length * made + pairs * (self.width + self.kv_rank)
        return context * made + pairs * (self.query_dim + self.value_dim) < absorbed


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Linear attention: each value head has a state [value_dim, key_dim]."""

    kind: DeltaKind
    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``."""
    key_dim: int
    value_dim: int
    conv_kernel: int
    """Tokens that the causal convolutions of queries, keys and values span; 0: there are none."""

    def kept(self, ranks: int) -> StateKV:
        """What a layer keeps on one of ``ranks``: for each key head, the states of its value heads and the
        last inputs of the convolutions of its query, key and values."""
        shared = self.value_heads // self.key_heads
        channels = 2 * self.key_dim + shared * self.value_dim
        taps = max(0, self.conv_kernel - 1)
        return StateKV(self.key_heads // ranks, shared * self.value_dim * self.key_dim + channels * taps)


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Mamba-2 (https://arxiv.org/abs/2405.21060): each head has a state [head_dim, state_dim]."""

    heads: int
    head_dim: int
    groups: int
    """Groups of heads that have B and C in common."""
    state_dim: int
    conv_kernel: int
    units: int
    """Parts of the heads that tensor parallelism may separate; each keeps the convolution's inputs of its B
    and C. A multiple or a divisor of ``groups``, and a divisor of ``heads``."""

    def kept(self, ranks: int) -> StateKV:
        """What a layer keeps on one of ``ranks``: for each unit, the states of its heads, and the last inputs
        of the convolutions of x, B and C."""
        heads, groups = self.heads // self.units, max(1, self.groups // self.units)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        size = heads * self.head_dim * self.state_dim + channels * (self.conv_kernel - 1)
        return StateKV(self.units // ranks, size)


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """A gated short convolution (LFM2)."""

    channels: int
    conv_kernel: int
    units: int
    """Parts of the channels that tensor parallelism may separate."""

    def kept(self, ranks: int) -> StateKV:
        """What a layer keeps on one of ``ranks``: the last inputs of the convolution."""
        return StateKV(self.units // ranks, self.channels // self.units * (self.conv_kernel - 1))
