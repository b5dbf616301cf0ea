"""The config.json of checkpoints with linear attention, beside ``tests.support.published_configs``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_PERIOD = ["linear_attention"] * 3 + ["full_attention"]
_QWEN3_5_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
_QWEN3_5_TEXT = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_parameters": _QWEN3_5_ROPE,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}

PUBLISHED_STATES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "Qwen3-Next-80B-A3B-Instruct": {
            "architectures": ["Qwen3NextForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 151643,
            "decoder_sparse_step": 1,
            "eos_token_id": 151645,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_next",
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        "Qwen3.5-27B": {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 248056,
            "model_type": "qwen3_5",
            "text_config": {
                **_QWEN3_5_TEXT,
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "layer_types": _PERIOD * 16,
                "linear_num_value_heads": 48,
                "model_type": "qwen3_5_text",
                "num_attention_heads": 24,
                "num_hidden_layers": 64,
                "num_key_value_heads": 4,
            },
            "tie_word_embeddings": False,
        },
        "Qwen3.5-35B-A3B": {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "image_token_id": 248056,
            "model_type": "qwen3_5_moe",
            "text_config": {
                **_QWEN3_5_TEXT,
                "hidden_size": 2048,
                "layer_types": _PERIOD * 10,
                "linear_num_value_heads": 32,
                "model_type": "qwen3_5_moe_text",
                "moe_intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "shared_expert_intermediate_size": 512,
            },
            "tie_word_embeddings": False,
        },
    }
)
"""Published configs by the names of the checkpoints on the Hugging Face hub, without their owners."""
