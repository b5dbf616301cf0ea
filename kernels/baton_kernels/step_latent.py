"""What latent attention asks of one step, whatever computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton_kernels.latent_norms import LatentNorms
from baton_kernels.paged import Chunk


class StepLatent(Protocol):
    """One step's reads and writes of a pool of latents, [blocks, 1, layers, 1, block_size, width], the same
    for all layers."""

    def store(self, view: Tensor, layer: int, latents: Tensor) -> None:
        """Puts the latents [T, width] of the step's tokens into their slots."""

    def store_normed(
        self, view: Tensor, layer: int, down: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """See ``LatentPlan.store_normed``."""

    def absorb(self, q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, factors: Tensor | None) -> Tensor:
        """See ``LatentPlan.absorb``."""

    def make_values(self, sums: Tensor, up: Tensor, value_dim: int) -> Tensor:
        """See ``LatentPlan.make_values``."""

    def attend(self, view: Tensor, layer: int, q: Tensor, *, scale: float, value_dim: int) -> Tensor:
        """See ``LatentPlan.attend``."""

    def gather(self, view: Tensor, layer: int, chunk: Chunk) -> Tensor:
        """See ``LatentPlan.gather``."""

    def attend_expanded(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See ``LatentPlan.attend_expanded``."""
