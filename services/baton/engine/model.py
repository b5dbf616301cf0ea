"""The model interface that the engine computes with."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton_kernels.paged import PagedBatch


class Model(Protocol):
    """The methods of a model that the engine calls."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """Compute ``token_ids`` [T] int64 → hidden states [T, H], or [R, H] of the rows that ``batch.wanted``
        names; write the tokens' K and V into ``pool``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states: [R, H] → [R, V] float32."""
        ...
