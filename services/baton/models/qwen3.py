"""Qwen3 (https://arxiv.org/abs/2505.09388): Llama with queries and keys normalized per head."""

from __future__ import annotations

from typing import ClassVar

import torch

from baton.models.config import ModelConfig
from baton.models.layers import Attention, RMSNorm
from baton.models.llama import LlamaForCausalLM
from baton.models.quantization.base import QuantizationScheme
from baton.parallel.collectives import Parallel
from baton_kernels.rotary import HeadNorm


class Qwen3Attention(Attention):
    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
    ) -> None:
        super().__init__(config, layer, dtype, parallel, scheme)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    @property
    def head_norm(self) -> HeadNorm:
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention: ClassVar[type[Attention]] = Qwen3Attention
