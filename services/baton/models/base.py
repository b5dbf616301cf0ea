"""What the engine needs of a model, whatever its family."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.quantization import Quantization
from baton.parallel.collectives import Parallel
from baton_kernels.paged import PagedBatch


class Place(NamedTuple):
    """A slice of a parameter, and the part of a tensor in the checkpoint that fills it."""

    tensor: Tensor
    source: tuple[slice, ...]
    """Of each dimension of the checkpoint's tensor; slice(None): all of it."""
    scales: Tensor | None = None
    """Of the rows of ``tensor``, if that is int8."""


class CausalLM(nn.Module):
    """A decoder-only language model over a paged KV pool.

    A family is built as ``Family(config, dtype, parallel)`` on torch's current default device, with weights
    that are not yet filled. It has the part of the model that ``parallel`` says. All ranks call ``forward``
    and ``logits`` in the same order, with the same tokens and as many rows.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.quantization: Quantization = "none"
        self.shard = parallel.shard
        self.collectives = parallel.collectives

    @abstractmethod
    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """token_ids [T] int64 -> the final norm's output [T, hidden_size], or [R, hidden_size] of the rows
        that ``batch.wanted`` names; the tokens' K and V go to pool.

        Before the last stage of a pipeline it is that stage's own output, for ``logits`` alone."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> what the first layer gets [T, hidden_size], in the weights' type. First
        stage of a pipeline only."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size], the rows that need a next token -> [R, vocab_size] float32; on
        other ranks than the leader something that is worth nothing."""

    @abstractmethod
    def quantize(self) -> None:
        """Have the weights of matmuls kept as int8, before they are filled; embeddings and norms stay.
        ModelError if that cannot be."""

    @abstractmethod
    def pack(self) -> None:
        """Lay weights out as the kernels of their device read them, once they are filled. Their plain form,
        ``checkpoint_tensors`` included, may be gone afterwards."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Place]:
        """Name in the checkpoint -> the slice of a parameter that it fills. Together they fill all, once."""
