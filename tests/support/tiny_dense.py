"""Tiny random models of the families without experts, beside those of ``tests.support.tiny_models``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from transformers import (
    Cohere2Config,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    InternLM3Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tests.support.tiny_models import Recipe, rope_of

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = rope_of("yarn", factor=4.0, original_max_position_embeddings=256)
LONGROPE = rope_of(
    "longrope",
    short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.2],
    long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    partial_rotary_factor=0.75,
)
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_use_head": False,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Renamed:
    """A tiny model saved under the name of an architecture that transformers serves with another's class."""

    recipe: Recipe
    architecture: str

    def __call__(self, path: Path) -> Path:
        """Save the model in ``path`` (created) and return it."""
        file = self.recipe(path) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [self.architecture]}))
        return path


def gemma3_with_encoder(**fields: object) -> PretrainedConfig:
    text = {"model_type": "gemma3_text", **fields}
    return Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4)


def mistral3_with_encoder(**fields: object) -> PretrainedConfig:
    tied = bool(fields["tie_word_embeddings"])
    return Mistral3Config(text_config=fields, vision_config=PIXTRAL, tie_word_embeddings=tied)


DENSE: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "gemma2": Recipe(
            Gemma2Config,
            {"head_dim": 32, "query_pre_attn_scalar": 40, "sliding_window": 20, "num_attention_heads": 8},
        ),
        "gemma2-uncapped-untied": Recipe(
            Gemma2Config,
            {
                "head_dim": 16,
                "query_pre_attn_scalar": 9,
                "num_key_value_heads": 1,
                "tie_word_embeddings": False,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "attention_bias": True,
                "sliding_window": 33,
                "layer_types": [FULL, SLIDING, SLIDING],
            },
        ),
        "gemma3": Recipe(
            Gemma3TextConfig,
            {
                "head_dim": 32,
                "query_pre_attn_scalar": 20,
                "sliding_window": 19,
                "layer_types": [SLIDING, SLIDING, FULL],
                "rope_parameters": {FULL: rope_of("linear", factor=8.0), SLIDING: rope_of("default")},
            },
        ),
        "gemma3-with-encoder": Recipe(
            gemma3_with_encoder,
            {
                "head_dim": 16,
                "num_attention_heads": 6,
                "hidden_size": 48,
                "sliding_window": 30,
                "layer_types": [SLIDING, FULL, SLIDING],
                "rope_parameters": {
                    FULL: {"rope_type": "default", "rope_theta": 1e6},
                    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
                },
            },
        ),
        "glm": Recipe(GlmConfig, {"head_dim": 32}),
        "glm4": Recipe(
            Glm4Config,
            {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": False},
        ),
        "glm4-mqa-biased": Recipe(
            Glm4Config,
            {
                "head_dim": 16,
                "num_key_value_heads": 1,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "rope_parameters": rope_of("default", partial_rotary_factor=0.25),
            },
        ),
        "phi3": Recipe(Phi3Config, {"sliding_window": 21, "num_key_value_heads": 4, "pad_token_id": 0}),
        "phi3-longrope": Recipe(
            Phi3Config,
            {
                "rope_parameters": LONGROPE,
                "original_max_position_embeddings": 64,
                "tie_word_embeddings": True,
                "pad_token_id": 0,
            },
        ),
        "phi3-partial": Recipe(
            Phi3Config,
            {
                "rope_parameters": rope_of("default", partial_rotary_factor=0.5),
                "num_attention_heads": 8,
                "pad_token_id": 0,
            },
        ),
        "granite": Recipe(
            GraniteConfig,
            {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.11,
                "residual_multiplier": 0.6,
                "logits_scaling": 1.3,
            },
        ),
        "granite-biased-tied": Recipe(
            GraniteConfig,
            {
                "num_key_value_heads": 1,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
                "attention_multiplier": 0.25,
                "embedding_multiplier": 1.5,
                "logits_scaling": 0.8,
            },
        ),
        "olmo2": Recipe(Olmo2Config, {"num_key_value_heads": 4}),
        "olmo2-gqa-biased": Recipe(
            Olmo2Config,
            {
                "num_attention_heads": 8,
                "attention_bias": True,
                "rms_norm_eps": 1e-3,
                "num_key_value_heads": 2,
            },
        ),
        "olmo3": Recipe(
            Olmo3Config,
            {
                "num_hidden_layers": 4,
                "sliding_window": 18,
                "rope_parameters": {FULL: YARN, SLIDING: rope_of("default")},
            },
        ),
        "smollm3": Recipe(SmolLM3Config, {"num_hidden_layers": 4}),
        "smollm3-window": Recipe(
            SmolLM3Config,
            {
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "tie_word_embeddings": False,
                "use_sliding_window": True,
                "sliding_window": 22,
                "no_rope_layers": [0, 1, 1],
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        "seed-oss": Recipe(SeedOssConfig, {"head_dim": 48}),
        "seed-oss-biased": Recipe(
            SeedOssConfig,
            {
                "head_dim": 16,
                "num_attention_heads": 6,
                "attention_bias": False,
                "attention_out_bias": True,
                "mlp_bias": True,
            },
        ),
        "ernie4_5": Recipe(Ernie4_5Config, {"head_dim": 32}),
        "ernie4_5-biased": Recipe(
            Ernie4_5Config,
            {"head_dim": 16, "num_attention_heads": 6, "use_bias": True, "tie_word_embeddings": False},
        ),
        "cohere2": Recipe(Cohere2Config, {"num_hidden_layers": 4, "sliding_window": 17, "logit_scale": 1.25}),
        "cohere2-biased-mqa": Recipe(
            Cohere2Config,
            {
                "num_key_value_heads": 1,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "logit_scale": 0.9,
                "sliding_window": 40,
                "layer_types": [FULL, SLIDING, FULL],
            },
        ),
        "internlm3": Renamed(
            Recipe(InternLM3Config, {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
            "InternLM3ForCausalLM",
        ),
        "starcoder2": Recipe(Starcoder2Config, {"sliding_window": 25}),
        "starcoder2-unbiased": Recipe(
            Starcoder2Config,
            {
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "use_bias": False,
                "tie_word_embeddings": False,
            },
        ),
        "ministral": Recipe(
            MinistralConfig, {"sliding_window": 27, "head_dim": 24, "layer_types": [SLIDING, FULL, SLIDING]}
        ),
        "ministral3": Recipe(
            Ministral3Config,
            {
                "head_dim": 32,
                "rope_parameters": {
                    **rope_of("yarn", factor=16.0, original_max_position_embeddings=16),
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.3,
                },
                "max_position_embeddings": 256,
            },
        ),
        "mistral3-of-mistral": Recipe(
            mistral3_with_encoder,
            {"model_type": "mistral", "head_dim": 24, "sliding_window": None, "tie_word_embeddings": False},
        ),
        "mistral3-of-ministral3": Recipe(
            mistral3_with_encoder,
            {
                "model_type": "ministral3",
                "head_dim": 16,
                "num_key_value_heads": 1,
                "sliding_window": 26,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    **rope_of("yarn", factor=4.0, original_max_position_embeddings=32),
                    "llama_4_scaling_beta": 0.1,
                },
            },
        ),
        "hunyuan": Recipe(
            HunYuanDenseV1Config,
            {"head_dim": 32, "rope_parameters": {**rope_of("dynamic", factor=1.0), "alpha": 50.0}},
        ),
        "hunyuan-mha-biased": Recipe(
            HunYuanDenseV1Config,
            {
                "head_dim": 16,
                "num_key_value_heads": 4,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        ),
    }
)
"""Name -> builder, as ``TINY_MODELS``."""
