"""Llama (https://arxiv.org/abs/2302.13971), and Mistral and Qwen2, which differ in config only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.layers import Attention, Embedding, Linear, Narrow, RMSNorm, Step, SwiGLU
from baton.models.quantization.base import Multiplier, Place, QuantizationScheme
from baton.models.rope import RotaryEmbedding
from baton.parallel.collectives import Parallel
from baton_kernels.attention import AttentionPlan
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.layers import LayerStack, LayerWeights
from baton_kernels.paged import PagedBatch, WantedRows


class LlamaLayer(nn.Module):
    """Attention, then the MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = SwiGLU(config, dtype, parallel, scheme)

    def forward(
        self, delta: Tensor | None, x: Tensor, step: Step, narrow: Narrow | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output of this layer's MLP, to be added to the residual stream, and the stream, x [T, hidden],
        which this changes; with ``narrow``, [R, hidden] of both. ``delta`` is the MLP output of the layer
        before; None: nothing."""
        attended = self.self_attn(self.input_layernorm.after_adding(delta, x), step, narrow)
        if narrow is not None:
            x = x[narrow.rows]
        return self.mlp(self.post_attention_layernorm.after_adding(attended, x)), x

    def store(self, delta: Tensor | None, x: Tensor, step: Step) -> None:
        """The part of ``forward`` that is needed where it yields no row: puts K and V into the pool."""
        self.self_attn.store(self.input_layernorm.after_adding(delta, x), step)

    @property
    def packed(self) -> LayerWeights | None:
        """The packed weights of the layer; None if any of them is not packed."""
        qkv, o = self.self_attn.qkv_proj.packed, self.self_attn.o_proj.packed
        gate_up, down = self.mlp.gate_up_proj.packed, self.mlp.down_proj.packed
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        norms = self.input_layernorm.as_norm, self.post_attention_layernorm.as_norm
        attention = self.self_attn
        return LayerWeights(*norms, qkv, o, gate_up, down, attention.window, head_norm=attention.head_norm)


class LlamaForCausalLM(CausalLM):
    """A Llama model. Families with the same skeleton derive from this and set their ``attention``."""

    attention: ClassVar[type[Attention]] = Attention

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel, scheme: QuantizationScheme
    ) -> None:
        super().__init__(config, dtype, parallel, scheme)
        shard, size = parallel.shard, config.hidden_size
        self.windows = frozenset(config.windows[layer] for layer in shard.layers)
        self.rope = RotaryEmbedding(config)
        tied = config.tie_word_embeddings
        self.embed_tokens = None
        if shard.is_first_stage or (tied and shard.is_last_stage):
            self.embed_tokens = Embedding(shard.vocab, size, dtype, is_part=shard.tp_size > 1)
        # By the layer's number in the whole model, which is its name in the checkpoint.
        self.layers = nn.ModuleDict()
        for layer in shard.layers:
            attention = self.attention(config, layer, dtype, parallel, scheme)
            self.layers[str(layer)] = LlamaLayer(config, attention, dtype, parallel, scheme)
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype) if shard.is_last_stage else None
        with_head = shard.is_last_stage and not tied
        self.lm_head = Linear(size, shard.vocab, dtype, scheme=scheme) if with_head else None
        self._head: Multiplier | None = None
        """The output head, once it is packed; on the last stage alone."""
        self.stack: LayerStack | None = None
        """The layers as one call, where one rank has all of each layer and a CPU's kernels compute them."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        cos, sin = self.rope(batch.positions, batch.lengths)
        step = Step(pool, AttentionPlan.build(batch, pool, self.windows, len(self.shard.heads)), cos, sin)
        # The residual stream stays in float32: every layer adds to it, and in bfloat16 each sum would round
        # all earlier ones (transformers does; it costs up to half as much again in accuracy).
        x: Tensor
        if self.shard.is_first_stage:
            x = self.embed(token_ids).float()
        else:
            shape = len(token_ids), self.config.hidden_size
            x = self.collectives.take_over(torch.empty(shape, dtype=torch.float32, device=token_ids.device))
        layers = cast(list[LlamaLayer], list(self.layers.values()))
        if self.norm is None:
            delta, x = self._through(layers, x, step)
            assert delta is not None, "a stage has a layer"
            self.collectives.pass_on(x.add_(delta))
            return x if batch.wanted is None else x[: len(batch.wanted.rows)]
        if batch.wanted is None:
            delta, x = self._through(layers, x, step)
        else:
            *before, last = layers
            delta, x = self._through(before, x, step)
            if not len(batch.wanted.rows):
                last.store(delta, x, step)
                return x[:0].to(self.dtype)
            delta, x = last(delta, x, step, self._narrow(batch.wanted, batch, pool))
        hidden: Tensor = self.norm.after_adding(delta, x)
        return hidden

    def _through(self, layers: Sequence[LlamaLayer], x: Tensor, step: Step) -> tuple[Tensor | None, Tensor]:
        """Runs ``layers``, the first layers of the model. Returns the last one's output for the residual
        stream, and the stream."""
        plan = step.plan.step
        if self.stack is not None and layers and isinstance(plan, CpuPlan):
            return self.stack.run(len(layers), x, step.pool, plan, [(step.cos, step.sin)]), x
        delta: Tensor | None = None
        for layer in layers:
            delta, x = layer(delta, x, step)
        return delta, x

    def _narrow(self, wanted: WantedRows, batch: PagedBatch, pool: Tensor) -> Narrow:
        """The inputs of the whole model's last layer in a step whose ``wanted`` rows alone are needed."""
        windows = {self.config.windows[-1]}
        plan = AttentionPlan.build(batch.narrowed(wanted), pool, windows, len(self.shard.heads))
        return Narrow(wanted.rows, plan)

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        return self.collectives.sum(self.embed_tokens(token_ids))

    def logits(self, hidden: Tensor) -> Tensor:
        if not self.shard.is_last_stage:
            return self.collectives.collect(hidden[:, :0].to(self.dtype)).float()
        assert self._head is not None, "not packed"
        # A single rank computes float32 at once; other ranks expect the weights' type.
        whole = torch.float32 if self.shard.world == 1 else None
        return self.collectives.collect(self._head.multiply(hidden, whole)).float()

    def pack(self) -> None:
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        self.stack = self._stacked()
        # A tied head that is packed exists twice from now on: an embedding is looked up row by row.
        if self.lm_head is not None:
            self._head = self.lm_head.multiplier
        elif self.shard.is_last_stage and self.embed_tokens is not None:
            self._head = self.scheme.tied(self.embed_tokens.weight).pack()

    def _stacked(self) -> LayerStack | None:
        layers = [cast(LlamaLayer, layer).packed for layer in self.layers.values()]
        packed = [layer for layer in layers if layer is not None]
        if self.shard.tp_size > 1 or not packed or len(packed) < len(layers):
            return None
        return LayerStack(packed, heads=len(self.shard.heads), scale=self.config.head_dim**-0.5)

    def checkpoint_tensors(self) -> dict[str, Place]:
        places: dict[str, Place] = {}
        for path, module in self.named_modules():
            # Everything but the output head lies under "model." in checkpoints.
            name = path if path == "lm_head" else f"model.{path}"
            if isinstance(module, Linear):
                places |= _places(name, module)
                continue
            source = module.source if isinstance(module, Embedding) else (slice(None),)
            for kind, parameter in module.named_parameters(recurse=False):
                places[f"{name}.{kind}"] = Place(parameter, source)
        return places


def _places(name: str, module: Linear) -> dict[str, Place]:
    """The places of a module's tensors, by their names in the checkpoint; none once its weights are given
    up."""
    if module.weights is None:
        return {}
    parent = name.rpartition(".")[0]
    return {
        f"{parent}.{part}.{kind}" if part else f"{name}.{kind}": place
        for part, tensors in module.weights.places().items()
        for kind, place in tensors.items()
    }
