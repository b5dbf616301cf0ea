"""Tiny random models of the families with experts, beside those of ``tests.support.tiny_models``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transformers import (
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    Llama4Config,
    Llama4TextConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.support.tiny_models import Recipe, rope_of

LONGROPE = rope_of(
    "longrope",
    factor=4.0,
    original_max_position_embeddings=256,
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[1.5 + 0.5 * i for i in range(8)],
    short_mscale=1.2,
    long_mscale=1.3,
)

LLAMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}


def llama4_with_encoder(**fields: object) -> PretrainedConfig:
    text = {"model_type": "llama4_text", **fields}
    return Llama4Config(text_config=text, vision_config=LLAMA4_VISION)


MIXTURES: Mapping[str, Recipe] = MappingProxyType(
    {
        "mixtral": Recipe(MixtralConfig, {"num_local_experts": 5, "intermediate_size": 48}),
        "mixtral-window": Recipe(
            MixtralConfig,
            {
                "num_local_experts": 3,
                "num_experts_per_tok": 1,
                "num_attention_heads": 6,
                "num_key_value_heads": 1,
                "head_dim": 20,
                "sliding_window": 19,
                "tie_word_embeddings": True,
            },
        ),
        "qwen2-moe": Recipe(
            Qwen2MoeConfig,
            {
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "shared_expert_intermediate_size": 56,
                "tie_word_embeddings": True,
            },
        ),
        "qwen2-moe-dense-layers": Recipe(
            Qwen2MoeConfig,
            {
                "num_hidden_layers": 4,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 36,
                "shared_expert_intermediate_size": 44,
                "norm_topk_prob": True,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [3],
                "qkv_bias": False,
                "use_sliding_window": True,
                "sliding_window": 21,
                "max_window_layers": 3,
            },
        ),
        "qwen3-moe": Recipe(
            Qwen3MoeConfig,
            {"num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "head_dim": 32},
        ),
        "qwen3-moe-dense-layers": Recipe(
            Qwen3MoeConfig,
            {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "norm_topk_prob": True,
                "mlp_only_layers": [1],
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 23,
                "tie_word_embeddings": True,
            },
        ),
        "glm4-moe": Recipe(
            Glm4MoeConfig,
            {
                "n_routed_experts": 12,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.7,
                "n_shared_experts": 2,
                "attention_bias": True,
            },
        ),
        "glm4-moe-normed": Recipe(
            Glm4MoeConfig,
            {
                "n_routed_experts": 7,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 36,
                "first_k_dense_replace": 2,
                "norm_topk_prob": False,
                "use_qk_norm": True,
                "head_dim": 24,
                "partial_rotary_factor": 0.25,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
            },
        ),
        "minimax-m2": Recipe(
            MiniMaxM2Config,
            {
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "intermediate_size": 44,
                "head_dim": 24,
                "rotary_dim": 16,
            },
        ),
        "minimax-m2-mqa": Recipe(
            MiniMaxM2Config,
            {
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "intermediate_size": 36,
                "head_dim": 16,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
        ),
        "hy-v3": Recipe(
            HYV3Config,
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 24},
        ),
        "hy-v3-biased": Recipe(
            HYV3Config,
            {
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 28,
                "num_shared_experts": 2,
                "router_scaling_factor": 1.4,
                "head_dim": 16,
                "attention_bias": True,
                "mlp_bias": True,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "tie_word_embeddings": True,
            },
        ),
        "hunyuan-moe": Recipe(
            HunYuanMoEV1Config,
            {
                "num_experts": 6,
                "moe_topk": 2,
                "intermediate_size": 44,
                "head_dim": 16,
                "tie_word_embeddings": True,
            },
        ),
        "hunyuan-moe-alpha": Recipe(
            HunYuanMoEV1Config,
            {
                "num_experts": 5,
                "moe_topk": [3, 3, 3],
                "intermediate_size": 52,
                "head_dim": 24,
                "attention_bias": True,
                "rope_parameters": rope_of("dynamic", factor=1.0, alpha=50.0),
            },
        ),
        "gpt-oss": Recipe(
            GptOssConfig,
            {
                "num_local_experts": 6,
                "num_experts_per_tok": 2,
                "intermediate_size": 44,
                "head_dim": 16,
                "sliding_window": 21,
                "swiglu_limit": 1.5,
            },
        ),
        "gpt-oss-plain-rope": Recipe(
            GptOssConfig,
            {
                "num_local_experts": 5,
                "num_experts_per_tok": 3,
                "intermediate_size": 36,
                "head_dim": 24,
                "num_attention_heads": 6,
                "num_key_value_heads": 1,
                "sliding_window": 17,
                "attention_bias": False,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                "rope_parameters": rope_of("default"),
            },
        ),
        "llama4": Recipe(
            Llama4TextConfig,
            {
                "num_hidden_layers": 4,
                "num_local_experts": 6,
                "intermediate_size": 44,
                "intermediate_size_mlp": 76,
                "head_dim": 16,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 24,
                "floor_scale": 8,
                "rope_parameters": rope_of(
                    "llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=1.0,
                    original_max_position_embeddings=256,
                ),
            },
        ),
        "llama4-unnormed": Recipe(
            Llama4TextConfig,
            {
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "intermediate_size": 36,
                "intermediate_size_mlp": 52,
                "head_dim": 24,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "moe_layers": [0, 2],
                "use_qk_norm": False,
                "attention_bias": True,
                "attn_temperature_tuning": False,
                "no_rope_layers": [1, 0, 1],
                "layer_types": ["full_attention", "full_attention", "chunked_attention"],
                "attention_chunk_size": 29,
            },
        ),
        "llama4-with-encoder": Recipe(
            llama4_with_encoder,
            {
                "num_local_experts": 4,
                "intermediate_size": 40,
                "intermediate_size_mlp": 60,
                "head_dim": 16,
                "num_key_value_heads": 1,
                "moe_layers": [1],
                "attention_chunk_size": 26,
                "floor_scale": 16,
            },
        ),
        "phimoe": Recipe(
            PhimoeConfig,
            {
                "num_local_experts": 5,
                "intermediate_size": 48,
                "attention_bias": True,
                "lm_head_bias": True,
                "router_jitter_noise": 0.2,
                "original_max_position_embeddings": 256,
                "rope_parameters": LONGROPE,
            },
        ),
        "phimoe-window": Recipe(
            PhimoeConfig,
            {
                "num_local_experts": 3,
                "intermediate_size": 36,
                "sliding_window": 25,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
        ),
        "granite-moe": Recipe(
            GraniteMoeConfig,
            {
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "intermediate_size": 44,
                "embedding_multiplier": 0.7,
                "logits_scaling": 1.6,
                "residual_multiplier": 0.6,
                "attention_multiplier": 0.2,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        "granite-moe-shared": Recipe(
            GraniteMoeSharedConfig,
            {
                "num_local_experts": 5,
                "intermediate_size": 36,
                "shared_intermediate_size": 52,
                "residual_multiplier": 0.7,
                "attention_multiplier": 0.3,
            },
        ),
        "olmoe": Recipe(
            OlmoeConfig,
            {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40},
        ),
        "olmoe-biased": Recipe(
            OlmoeConfig,
            {
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "intermediate_size": 36,
                "norm_topk_prob": True,
                "attention_bias": True,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            },
        ),
        "ernie45-moe": Recipe(
            Ernie4_5_MoeConfig,
            {
                "moe_num_experts": 6,
                "moe_k": 2,
                "moe_intermediate_size": 40,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 24,
            },
        ),
        "ernie45-moe-biased": Recipe(
            Ernie4_5_MoeConfig,
            {
                "num_hidden_layers": 5,
                "moe_num_experts": 5,
                "moe_k": 3,
                "moe_intermediate_size": 28,
                "moe_num_shared_experts": 0,
                "moe_layer_interval": 2,
                "moe_layer_end_index": 2,
                "use_bias": True,
                "tie_word_embeddings": False,
            },
        ),
    }
)
"""Name -> builder, as ``TINY_MODELS``."""
