"""Ring-linear 2.0 in plain torch, written to be read, for transformers' automatic classes: they have none.

Linear attention is computed like attention, with a matrix of decays instead of a softmax. There is no cache:
a sequence is computed as a whole again.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast


class RingLinearConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    model_type = "bailing_moe_linear"

    def __init__(self, **fields: object) -> None:
        defaults: dict[str, object] = {
            "rms_norm_eps": 1e-6,
            "rope_theta": 600_000.0,
            "partial_rotary_factor": 0.5,
            "layer_group_size": 3,
            "group_norm_size": 2,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 24,
            "num_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {},
        }
        super().__init__(**{**defaults, **fields})  # type: ignore[arg-type]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().reshape(*x.shape[:-1], self.groups, -1)
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (normed.reshape(x.shape) * self.weight).to(x.dtype)


def powers(heads: int) -> list[float]:
    """ALiBi's: eighths of a power of two of heads, and between them for the others."""
    whole = 1 << (heads.bit_length() - 1)
    between = [4 * (2 * n + 1) / whole for n in range(heads - whole)]
    return [8 * (n + 1) / whole for n in range(whole)] + between


def projection(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RingAttention(nn.Module):
    def __init__(self, config: RingLinearConfig, layer: int, linear: bool) -> None:
        super().__init__()
        self.heads, size, eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        self.kv_heads = self.heads if linear else config.num_key_value_heads
        self.dim = config.head_dim
        inner = self.heads * self.dim
        self.query_key_value = projection(size, inner + 2 * self.kv_heads * self.dim)
        self.dense = projection(inner, size)
        with_norms = config.use_qk_norm
        self.query_layernorm = Norm(self.dim, eps) if with_norms else nn.Identity()
        self.key_layernorm = Norm(self.dim, eps) if with_norms else nn.Identity()
        self.decays: list[float] | None = None
        if linear:
            self.g_proj = projection(size, inner)
            self.g_norm = Norm(inner, eps, config.group_norm_size)
            less = 1 - (layer - 1) / (config.num_hidden_layers - 1) + 1e-5
            self.decays = [-less * 2**-power for power in powers(self.heads)]
        self.rotated = int(self.dim * config.partial_rotary_factor)
        self.theta = config.rope_theta

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = [heads * self.dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.query_key_value(x).split(sizes, dim=-1)
        q, k, v = (part.view(batch, length, -1, self.dim).transpose(1, 2) for part in parts)
        q, k = self._rotated(self.query_layernorm(q)), self._rotated(self.key_layernorm(k))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * self.dim**-0.5
        later = torch.arange(length)[:, None] - torch.arange(length)
        if self.decays is None:
            weights = scores.masked_fill(later < 0, -math.inf).softmax(-1)
        else:
            fading = torch.tensor(self.decays)[:, None, None] * later.clamp(min=0)
            weights = (scores * fading.exp()).masked_fill(later < 0, 0)
        out = (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2)
        if self.decays is not None:
            out = self.g_norm(out) * torch.sigmoid(self.g_proj(x))
        dense: Tensor = self.dense(out)
        return dense

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.rotated // 2
        frequencies = self.theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[2])[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


class RingMLP(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = projection(size, inner), projection(size, inner)
        self.down_proj = projection(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RingRouter(nn.Module):
    def __init__(self, config: RingLinearConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(config.num_experts, config.hidden_size))
        self.expert_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the weights of all experts, most of them 0."""
        config = self.config
        scores = torch.sigmoid(x.float() @ self.weight.float().T)
        biased = (scores + self.expert_bias).view(*scores.shape[:-1], config.n_group, -1)
        groups = biased.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        allowed = torch.zeros(biased.shape[:-1]).scatter(-1, groups, 1)[..., None] > 0
        chosen = biased.masked_fill(~allowed, -math.inf).flatten(-2).topk(config.num_experts_per_tok)
        weights = torch.zeros_like(scores).scatter(-1, chosen.indices, scores.gather(-1, chosen.indices))
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * float(config.routed_scaling_factor)


class RingMoE(nn.Module):
    def __init__(self, config: RingLinearConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.gate = RingRouter(config)
        inner, shared = config.moe_intermediate_size, config.moe_shared_expert_intermediate_size
        self.experts = nn.ModuleList(RingMLP(size, inner) for _ in range(config.num_experts))
        self.shared_experts = RingMLP(size, shared * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).to(x.dtype)
        out: Tensor = self.shared_experts(x)
        for number, expert in enumerate(self.experts):
            out = out + weights[..., number, None] * expert(x)
        return out


class RingLayer(nn.Module):
    def __init__(self, config: RingLinearConfig, layer: int) -> None:
        super().__init__()
        size, eps, group = config.hidden_size, config.rms_norm_eps, config.layer_group_size
        whole = config.num_hidden_layers // group * group
        linear = (layer + 1) % group != 0 and layer < whole
        self.attention = RingAttention(config, layer, linear)
        dense = layer < config.first_k_dense_replace
        self.mlp = RingMLP(size, config.intermediate_size) if dense else RingMoE(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        both: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return both


class RingModel(nn.Module):
    def __init__(self, config: RingLinearConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RingLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed


class BailingMoeLinearV2ForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    config_class = RingLinearConfig
    _supports_attention_backend = True

    def __init__(self, config: RingLinearConfig) -> None:
        super().__init__(config)
        self.model = RingModel(config)
        self.lm_head = projection(config.hidden_size, config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.word_embeddings
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **others: object,
    ) -> CausalLMOutputWithPast:
        """``past_key_values``: the tokens before, as the model returns them. No token is padding."""
        assert attention_mask is None or attention_mask.all()
        ids = input_ids if past_key_values is None else torch.cat((past_key_values, input_ids), dim=1)
        logits = self.lm_head(self.model(ids))[:, -input_ids.shape[1] :]
        return CausalLMOutputWithPast(logits=logits, past_key_values=ids)  # type: ignore[arg-type]

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, **kwargs: object
    ) -> dict[str, object]:
        return {"input_ids": input_ids}

    def _reorder_cache(self, past_key_values: Tensor, beams: Tensor) -> Tensor:
        return past_key_values[beams]


def register() -> None:
    """Let transformers' automatic classes know the model."""
    AutoConfig.register(RingLinearConfig.model_type, RingLinearConfig, exist_ok=True)
    AutoModelForCausalLM.register(RingLinearConfig, BailingMoeLinearV2ForCausalLM, exist_ok=True)
