"""Tiny random models of the families with latent attention, beside those of ``tests.support.tiny_models``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    Kimi_K25Config,
    MiniCPM3Config,
    Mistral3Config,
    Mistral4Config,
    PretrainedConfig,
    YoutuConfig,
)

from tests.support.tiny_dense import PIXTRAL, Renamed
from tests.support.tiny_models import Recipe, rope_of

SIZES: Mapping[str, object] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 20,
    }
)
"""Latents of 96 numbers, of which a CPU's kernels take all."""
EXPERTS: Mapping[str, object] = MappingProxyType(
    {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    }
)
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.9}
KIMI_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def mistral4_with_encoder(**fields: object) -> PretrainedConfig:
    text = {"model_type": "mistral4", **fields}
    return Mistral3Config(text_config=text, vision_config=PIXTRAL, tie_word_embeddings=False)


def kimi_with_encoder(**fields: object) -> PretrainedConfig:
    text = {"model_type": "deepseek_v3", **fields}
    return Kimi_K25Config(text_config=text, vision_config=KIMI_VISION, tie_word_embeddings=False)


def save_kimi(path: Path) -> Path:
    """Kimi-K2.5 with the names that its checkpoints have: of the architecture, and of layers, which
    transformers saves as blocks, like those of the encoder."""
    sizes = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    recipe = Recipe(kimi_with_encoder, {**SIZES, **EXPERTS, **sizes})
    file = Renamed(recipe, "KimiK25ForConditionalGeneration")(path) / "model.safetensors"
    saved, published = "language_model.model.blocks.", "language_model.model.layers."
    tensors = {name.replace(saved, published): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


LATENTS: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "deepseek-v2": Recipe(
            DeepseekV2Config,
            {**SIZES, **EXPERTS, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
        ),
        "deepseek-v2-lite": Recipe(
            DeepseekV2Config,
            {
                **SIZES,
                **EXPERTS,
                "q_lora_rank": None,
                "kv_lora_rank": 56,
                "qk_rope_head_dim": 8,
                "n_group": None,
                "topk_group": None,
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": rope_of(
                    "yarn", factor=4.0, original_max_position_embeddings=256, **MSCALES
                ),
            },
        ),
        "deepseek-v3": Recipe(DeepseekV3Config, {**SIZES, **EXPERTS, "first_k_dense_replace": 1}),
        "deepseek-v3-halves": Recipe(
            DeepseekV3Config,
            {
                **SIZES,
                **EXPERTS,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "first_k_dense_replace": 2,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
                "rope_interleave": False,
                "attention_bias": True,
                "rope_parameters": rope_of("linear", factor=2.0, mscale_all_dim=1.0),
            },
        ),
        "kimi-k25": save_kimi,
        "mistral4": Recipe(
            Mistral4Config,
            {
                **SIZES,
                **EXPERTS,
                "rope_parameters": {
                    **rope_of("yarn", factor=4.0, original_max_position_embeddings=32),
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
        ),
        "mistral4-with-encoder": Recipe(
            mistral4_with_encoder,
            {**SIZES, **EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        ),
        "minicpm3": Recipe(
            MiniCPM3Config,
            {
                **SIZES,
                "dim_model_base": 32,
                "rope_parameters": rope_of(
                    "longrope",
                    short_factor=[1.0 + 0.1 * i for i in range(16)],
                    long_factor=[1.0 + 0.4 * i for i in range(16)],
                    original_max_position_embeddings=256,
                ),
            },
        ),
        "minicpm3-direct-queries": Recipe(
            MiniCPM3Config,
            {
                **SIZES,
                "q_lora_rank": None,
                "scale_depth": None,
                "dim_model_base": None,
                "v_head_dim": None,
                "tie_word_embeddings": False,
            },
        ),
        "glm4-moe-lite": Recipe(Glm4MoeLiteConfig, {**SIZES, **EXPERTS, "num_nextn_predict_layers": 1}),
        "youtu": Recipe(YoutuConfig, {**SIZES, "kv_lora_rank": 30, "qk_rope_head_dim": 10}),
    }
)
"""Name -> builder, as ``TINY_MODELS``."""
