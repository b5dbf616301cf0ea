"""Tiny random models of the families whose layers keep a state by linear attention, beside those of
``tests.support.tiny_models``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from safetensors.torch import load_file, save_file
from transformers import (
    KimiLinearConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.support.ring_linear import RingLinearConfig, register
from tests.support.tiny_models import Recipe, rope_of

register()

LINEAR, FULL = "linear_attention", "full_attention"
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": [LINEAR, FULL, LINEAR],
    # A sequence's first output is a multiple of its value, by the product of query and key. A norm with a
    # smaller eps makes much of its rounding if that is near 0.
    "rms_norm_eps": 1e-4,
}
ODD_GDN = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 2,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
MROPE = rope_of("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)
KIMI = {
    "num_key_value_heads": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 32,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "layer_types": [LINEAR, FULL, LINEAR],
    "rms_norm_eps": 1e-4,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 1,
    "num_position_embeddings": 4,
    "out_hidden_size": 64,
}


def qwen3_5_with_encoder(**fields: object) -> PretrainedConfig:
    return Qwen3_5Config(text_config={"model_type": "qwen3_5_text", **fields}, vision_config=VISION)


def qwen3_5_moe_with_encoder(**fields: object) -> PretrainedConfig:
    return Qwen3_5MoeConfig(text_config={"model_type": "qwen3_5_moe_text", **fields}, vision_config=VISION)


@dataclass(frozen=True)
class KimiLinear:
    """A tiny Kimi-Linear as it is published: transformers names the MLPs of dense layers like experts, too,
    when it saves them."""

    recipe: Recipe

    def __call__(self, path: Path) -> Path:
        """Save the model in ``path`` (created) and return it."""
        file = self.recipe(path) / "model.safetensors"
        dense = re.compile(r"block_sparse_moe(?=\.\w+_proj\.weight)")
        tensors = {dense.sub("mlp", name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        return path


STATES: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "qwen3-next": Recipe(Qwen3NextConfig, {**GDN, **EXPERTS, "head_dim": 32}),
        "qwen3-next-odd": Recipe(
            Qwen3NextConfig,
            {
                **ODD_GDN,
                **EXPERTS,
                "head_dim": 16,
                "num_hidden_layers": 5,
                "full_attention_interval": 2,
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        "kimi-linear": KimiLinear(Recipe(KimiLinearConfig, KIMI)),
        "kimi-linear-odd": KimiLinear(
            Recipe(
                KimiLinearConfig,
                {
                    **KIMI,
                    "linear_num_heads": 4,
                    "linear_head_dim": 12,
                    "linear_conv_kernel_dim": 3,
                    "n_group": 4,
                    "topk_group": 2,
                    "moe_renormalize": False,
                    "num_hidden_layers": 5,
                    "layer_types": None,
                    "first_k_dense_replace": 2,
                    "n_shared_experts": 2,
                },
            )
        ),
        "ring-linear": Recipe(RingLinearConfig, {"head_dim": 32, "num_hidden_layers": 4}),
        "ring-linear-odd": Recipe(
            RingLinearConfig,
            {
                "head_dim": 16,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "group_norm_size": 3,
                "use_qk_norm": False,
                "layer_group_size": 2,
                "num_hidden_layers": 5,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
            },
        ),
        "qwen3-5": Recipe(Qwen3_5TextConfig, {**GDN, "head_dim": 16, "rope_parameters": MROPE}),
        "qwen3-5-with-encoder": Recipe(
            qwen3_5_with_encoder, {**GDN, "head_dim": 16, "rope_parameters": MROPE}
        ),
        "qwen3-5-moe": Recipe(
            Qwen3_5MoeTextConfig, {**GDN, **EXPERTS, "head_dim": 16, "rope_parameters": MROPE}
        ),
        "qwen3-5-moe-with-encoder": Recipe(
            qwen3_5_moe_with_encoder, {**GDN, **EXPERTS, "head_dim": 16, "rope_parameters": MROPE}
        ),
    }
)
