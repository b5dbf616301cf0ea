"""The norms of latents."""

from __future__ import annotations

from dataclasses import dataclass

from baton_kernels.norm import Norm


@dataclass(frozen=True, slots=True)
class LatentNorms:
    """The norms of the latents that a projection yields of each token: [q_rank + kv_rank + rope_dim]."""

    q: Norm | None
    """The norm of the latent that queries are made of; None: there is none, and q_rank is 0."""
    kv: Norm
    """The norm of the latent that keys and values are made of."""

    @property
    def q_rank(self) -> int:
        return 0 if self.q is None else self.q.weight.numel()

    @property
    def kv_rank(self) -> int:
        return self.kv.weight.numel()
