"""What the engine needs of a model, whatever its family."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton_kernels.paged import PagedBatch


class CausalLM(nn.Module):
    """A decoder-only language model over a paged KV pool.

    A family is built as ``Family(config, dtype)`` on torch's current default device, with weights that are
    not yet filled.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype

    @abstractmethod
    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """token_ids [T] int64 -> the final norm's output [T, hidden_size]; the tokens' K and V go to pool."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> what the first layer gets [T, hidden_size], in the weights' type."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size], the rows that need a next token -> [R, vocab_size] float32."""

    @abstractmethod
    def pack(self) -> None:
        """Lay weights out as the kernels of their device read them, once they are filled. Their plain form,
        ``checkpoint_tensors`` included, may be gone afterwards."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the slice of a parameter that it fills. Together they fill all, once."""
