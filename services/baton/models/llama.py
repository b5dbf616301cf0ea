"""Llama (https://arxiv.org/abs/2302.13971), and Mistral and Qwen2, which differ in config only."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.layers import Attention, Embedding, FusedLinear, Linear, RMSNorm, Step, SwiGLU
from baton.models.rope import RotaryEmbedding
from baton_kernels.attention import AttentionPlan
from baton_kernels.paged import PagedBatch


class LlamaLayer(nn.Module):
    """Attention, then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = SwiGLU(config, dtype)

    def forward(self, delta: Tensor | None, x: Tensor, step: Step) -> Tensor:
        """What this layer's MLP adds to x [T, hidden], the residual stream, which this changes. ``delta`` is
        what the layer before adds; None: nothing."""
        attended = self.self_attn(self.input_layernorm.after_adding(delta, x), step)
        added: Tensor = self.mlp(self.post_attention_layernorm.after_adding(attended, x))
        return added


class LlamaForCausalLM(CausalLM):
    """Families with the same skeleton derive from this and say what their attention is."""

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.windows = frozenset(config.windows)
        self.rope = RotaryEmbedding(config)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(
            LlamaLayer(config, self.attention(config, layer, dtype), dtype)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, dtype)

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        cos, sin = self.rope(batch.positions, batch.lengths)
        step = Step(pool, AttentionPlan.build(batch, pool, self.windows), cos, sin)
        # The residual stream stays in float32: every layer adds to it, and in bfloat16 each sum would round
        # all that came before (transformers does; it costs up to half as much again in accuracy).
        x = self.embed(token_ids).float()
        delta = None
        for layer in self.layers:
            delta = layer(delta, x, step)
        hidden: Tensor = self.norm.after_adding(delta, x)
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight).float()

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path, module in self.named_modules():
            # Everything but the output head lies under "model." in checkpoints.
            name = path if path == "lm_head" else f"model.{path}"
            parts = {name: slice(None)}
            if isinstance(module, FusedLinear):
                parent = name.rpartition(".")[0]
                parts = {f"{parent}.{part}": rows for part, rows in module.parts.items()}
            for kind, parameter in module.named_parameters(recurse=False):
                tensors |= {f"{part}.{kind}": parameter[rows] for part, rows in parts.items()}
        return tensors
