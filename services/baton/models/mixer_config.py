"""The sizes of what layers mix tokens by, besides attention over K and V. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isqrt
from typing import Literal

from baton_kernels.delta_kinds import GateKind
from baton_kernels.kv_layout import StateKV, TokenKV
from baton_kernels.mamba_sizes import MambaSizes

MixerKind = Literal["attention", "latent", "delta", "mamba", "conv"]
"""attention: over K and V. latent: over one latent vector a token (MLA). delta: linear attention by the delta
rule or by decay alone (gated delta nets, Kimi delta attention, lightning attention). mamba: Mamba-2. conv: a
short convolution alone (LFM2)."""
DeltaKind = Literal["gdn", "kda", "lightning"]
DeltaNames = Literal["grouped", "joined", "separate"]
"""The projections in the checkpoint. grouped: in_proj_qkvz and in_proj_ba, key head by key head
(Qwen3-Next). joined: in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (Qwen3.5). separate: q_proj, k_proj,
v_proj, b_proj, and f_proj and g_proj or, of low rank, f_a_proj, f_b_proj, g_a_proj and g_b_proj (Kimi)."""
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
    """Linear attention: each value head has a state [key_dim, value_dim]."""

    kind: DeltaKind
    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``."""
    key_dim: int
    value_dim: int
    conv_kernel: int
    """Tokens that the causal convolutions of queries, keys and values span; 0: there are none."""
    names: DeltaNames = "separate"
    gate: GateKind = "silu"
    """The activation of the output's gate."""
    low_rank: int | None = None
    """Numbers that the input of the decays, and the gate, are projected from; None: from all of the
    input."""
    lower_bound: float | None = None
    """See ``DeltaLayer.lower_bound``."""
    flat_rates: bool = True
    """Whether the checkpoint's A_log is [value_heads], not [1, 1, value_heads, 1]."""
    norm_groups: int = 1
    """Groups of heads whose outputs are normed together, of lightning attention."""

    def kept(self, ranks: int) -> StateKV:
        """What a layer keeps on one of ``ranks``: for each key head, the states of its value heads and the
        last inputs of the convolutions of its query, key and values."""
        shared = self.value_heads // self.key_heads
        channels = 2 * self.key_dim + shared * self.value_dim
        taps = max(0, self.conv_kernel - 1)
        return StateKV(self.key_heads // ranks, shared * self.value_dim * self.key_dim + channels * taps)

    def may_split(self, ranks: int) -> bool:
        """Whether so many ranks can have a part each."""
        grouped = self.kind != "lightning" or self.norm_groups % ranks == 0
        return grouped and self.key_heads % ranks == 0

    def __str__(self) -> str:
        groups = f" in {self.norm_groups} groups" if self.kind == "lightning" else ""
        return f"linear attention of {self.key_heads} key heads{groups}"


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
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, inf)
    """The least and the largest time step."""
    norm: bool = True
    """Whether the output is normed, by groups of heads."""
    gate_first: bool = True
    """Whether the gate multiplies what is normed, not the norm's result."""
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of the projected z, x, B, C and dt."""

    def sizes(self, ranks: int) -> MambaSizes:
        """The sizes of the part of one of ``ranks``."""
        return MambaSizes(
            units=self.units // ranks,
            heads=self.heads // self.units,
            head_dim=self.head_dim,
            groups=max(1, self.groups // ranks),
            state_dim=self.state_dim,
            conv_kernel=self.conv_kernel,
        )

    def kept(self, ranks: int) -> StateKV:
        """What a layer keeps on one of ``ranks``: for each unit, the states of its heads, and the last inputs
        of the convolutions of x, B and C."""
        sizes = self.sizes(ranks)
        return StateKV(sizes.units, sizes.state_size + sizes.unit_channels * (self.conv_kernel - 1))

    def may_split(self, ranks: int) -> bool:
        """Whether so many ranks can have a part each: whole units, of whole groups or of one."""
        return self.units % ranks == 0 and (self.groups % ranks == 0 or ranks % self.groups == 0)

    def __str__(self) -> str:
        return f"Mamba layers of {self.units} units of heads in {self.groups} groups"


def mamba_units(heads: int, groups: int) -> int:
    """Units of a layer: as many as may be, so that little of a page is lost, of two heads at least, for each
    costs a B and C."""
    small = [n for n in range(1, isqrt(heads) + 1) if heads % n == 0]
    fits = [n for n in (*small, *(heads // n for n in small)) if n % groups == 0 or groups % n == 0]
    return max(n for n in fits if n <= max(1, heads // 2))


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """A gated short convolution (LFM2)."""

    channels: int
    conv_kernel: int
    units: int
    """Parts of the channels that tensor parallelism may separate."""
    bias: bool = False
    """Whether the convolution and the projections around it have biases."""

    def kept(self, ranks: int) -> StateKV:
        """What a layer keeps on one of ``ranks``: the last inputs of the convolution."""
        return StateKV(self.units // ranks, self.channels // self.units * (self.conv_kernel - 1))

    def may_split(self, ranks: int) -> bool:
        """Whether so many ranks can have a part each."""
        return self.units % ranks == 0

    def __str__(self) -> str:
        return f"convolutions of {self.units} units of channels"
