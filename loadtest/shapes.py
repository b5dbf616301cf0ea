"""Models of well-known shapes with random weights, as Hugging Face directories that every engine loads.

python -m loadtest.shapes NAME DIRECTORY
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.quantization.plain import PLAIN
from baton.parallel.collectives import Parallel

NUM_BYTES = 256
_LLAMA_125M: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
)
"""A Llama of 125 million parameters."""
_LLAMA_SMALL: Mapping[str, object] = MappingProxyType(
    {
        **_LLAMA_125M,
        "vocab_size": 4096,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
)
"""A Llama of 42 million parameters with the heads of an 8B one."""
_QWEN_05B: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
)
"""Qwen2.5-0.5B: 494 million parameters."""
_LLAMA_8B: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    }
)
"""Llama 3.1 8B: 8.03 billion parameters."""
_ACTIVE_125M: Mapping[str, object] = MappingProxyType({**_LLAMA_125M, "intermediate_size": 512})
"""The Llama of 125 million parameters with a quarter of each MLP."""
_MIXTURE_125M: Mapping[str, object] = MappingProxyType(
    {
        **_LLAMA_125M,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
)
"""The Llama of 125 million parameters with each MLP cut into 8 experts, of which 2 are active: as many
parameters as ``_ACTIVE_125M`` in each token's way."""
_QWEN3_MOE_03B: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
)
"""A Qwen3-MoE of 0.29 billion parameters, 0.09 of them active."""
_GEMMA3_270M: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
)
"""Gemma 3 270M: 0.27 billion parameters, most of them in the embedding."""
_MLA_03B: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 1536,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 20,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
)
"""A DeepSeek-V2 of 0.32 billion parameters, none of them in experts, with the latents of V2-Lite."""
_GDN_03B: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 1536,
        "mlp_only_layers": list(range(19)),
        "decoder_sparse_step": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_hidden_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(20)],
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "tie_word_embeddings": False,
    }
)
"""A Qwen3-Next of 0.33 billion parameters: three gated delta nets for each gated attention. All layers but
the last have MLPs: vLLM takes no Qwen3-Next without experts, and no Qwen3.5 without torchvision."""
_LLAMA_TINY: Mapping[str, object] = MappingProxyType(
    {
        **_LLAMA_125M,
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
"""A model so small that a measurement can be tried out on any machine."""
_MIXTURE_TINY: Mapping[str, object] = MappingProxyType(
    {**_MIXTURE_125M, **{name: _LLAMA_TINY[name] for name in _LLAMA_TINY if "size" in name or "num_" in name}}
)
"""The tiny model with 8 experts in each layer."""
_QWEN3_30B_QUARTER: Mapping[str, object] = MappingProxyType(
    {
        **_QWEN3_MOE_03B,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }
)
"""Twelve of the 48 layers of Qwen3-30B-A3B: 8 billion parameters."""
SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama-125m": _LLAMA_125M,
        "active-125m": _ACTIVE_125M,
        "mixture-125m": _MIXTURE_125M,
        "qwen3-moe-0.3b": _QWEN3_MOE_03B,
        "gemma3-270m": _GEMMA3_270M,
        "mla-0.3b": _MLA_03B,
        "gdn-0.3b": _GDN_03B,
        "mixture-tiny": _MIXTURE_TINY,
        "qwen3-30b-a3b-quarter": _QWEN3_30B_QUARTER,
        "qwen-0.5b": _QWEN_05B,
        "llama-8b": _LLAMA_8B,
        "llama-small": _LLAMA_SMALL,
        "llama-tiny": _LLAMA_TINY,
    }
)


def save_config(path: Path, shape: Mapping[str, object]) -> Path:
    """Write the config of a model of this shape to ``path`` (created): an engine needs no more, with
    ``--load-format dummy``."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, **shape}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def save_unfilled(path: Path, shape: Mapping[str, object]) -> Path:
    """Write config and tokenizer of a model of this shape to ``path`` (created): ``--load-format dummy``
    draws its weights."""
    from tests.support.tiny_models import SPECIALS, save_byte_tokenizer  # transformers: seconds

    save_config(path, shape)
    save_byte_tokenizer(path, words=ModelConfig.from_dir(path).vocab_size - NUM_BYTES - len(SPECIALS))
    return path


def save_random(path: Path, shape: Mapping[str, object], seed: int = 0) -> Path:
    """Write a model of this shape in bfloat16 to ``path`` (created, unless it exists)."""
    if (path / "model.safetensors").is_file():
        return path
    return save_weights(save_unfilled(path, shape), seed)


def save_weights(path: Path, seed: int = 0) -> Path:
    """Write random weights in bfloat16 beside the config in ``path``: norms at 1, biases and rates of decay
    at 0, matrices scaled so that activations neither fade nor blow up."""
    read = ModelConfig.from_dir(path)
    with torch.device("meta"):
        model = Decoder(read, torch.bfloat16, Parallel.alone(read), PLAIN)
        shapes = {name: place.shape for name, place in model.checkpoint_tensors().items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("bias", "A_log")):
            tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
        elif len(shape) == 1:
            offset = 0.0 if ".linear_attn." in name else read.norm_offset  # a delta net's norm has none
            tensors[name] = torch.full(shape, 1 - offset, dtype=torch.bfloat16)
        else:
            weights = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[name] = weights.bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    chosen = parser.parse_args()
    print(save_random(chosen.directory, SHAPES[chosen.name]))


if __name__ == "__main__":
    main()
