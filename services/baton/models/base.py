"""The interface of a model to the engine, whatever its family."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.quantization.base import Place, QuantizationScheme
from baton.parallel.collectives import Parallel
from baton_kernels.kv_layout import KVLayout
from baton_kernels.paged import PagedBatch


class CausalLM(nn.Module):
    """A decoder-only language model over a paged KV pool.

    A family is built as ``Family(config, dtype, parallel, scheme)`` on torch's current default device, with
    weights that are not yet filled, in the form that ``scheme`` keeps for matmuls. It has the part of the
    model that ``parallel`` names. All ranks call ``forward`` and ``logits`` in the same order, with the same
    tokens and as many rows.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel, scheme: QuantizationScheme
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.scheme = scheme
        self.shard = parallel.shard
        self.collectives = parallel.collectives

    @abstractmethod
    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        """token_ids [T] int64 -> the final norm's output [T, hidden_size], or [R, hidden_size] of the rows
        that ``batch.wanted`` names; the tokens' K and V go to pool.

        Before the last stage of a pipeline the result is the stage's own output, for ``logits`` alone."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> the input of the first layer [T, hidden_size], in the weights' type. First
        stage of a pipeline only."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size], the rows that need a next token -> [R, vocab_size] float32; on other ranks
        than the leader the result is meaningless."""

    @abstractmethod
    def pack(self) -> None:
        """Lay weights out as the kernels of their device read them, once they are filled and before the first
        ``logits``. The memory that ``checkpoint_tensors`` names may be gone afterwards."""

    @abstractmethod
    def lay_out(self, layout: KVLayout) -> None:
        """Take pools of this layout from now on: [num_pages, numbers of a page], or, if it is plain, as a
        pool of a model whose layers all keep the same."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Place]:
        """Name in the checkpoint -> the memory that the tensor fills. Together the tensors fill all memory,
        once."""
