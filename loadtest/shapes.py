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
SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama-125m": _LLAMA_125M,
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
    """Write random weights in bfloat16 beside the config in ``path``: norms at 1, biases at 0, matrices
    scaled so that activations neither fade nor blow up."""
    read = ModelConfig.from_dir(path)
    with torch.device("meta"):
        model = Decoder(read, torch.bfloat16, Parallel.alone(read), PLAIN)
        places = {name: place.tensor for name, place in model.checkpoint_tensors().items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, place in places.items():
        if name.endswith(".bias"):
            tensors[name] = torch.zeros(place.shape, dtype=torch.bfloat16)
        elif place.dim() == 1:
            tensors[name] = torch.ones(place.shape, dtype=torch.bfloat16)
        else:
            weights = torch.randn(place.shape, generator=generator) * place.shape[1] ** -0.5
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
