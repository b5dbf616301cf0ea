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
from baton.models.registry import MODEL_CLASSES
from baton.parallel.collectives import Parallel
from tests.support.tiny_models import SPECIALS, save_byte_tokenizer

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
"""125 million parameters."""
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
"""494 million parameters: Qwen2.5-0.5B."""
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
"""8.03 billion parameters: Llama 3.1 8B."""
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
"""To see a measurement run where there is nothing to measure."""
SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama-125m": _LLAMA_125M,
        "qwen-0.5b": _QWEN_05B,
        "llama-8b": _LLAMA_8B,
        "llama-tiny": _LLAMA_TINY,
    }
)


def save_unfilled(path: Path, shape: Mapping[str, object]) -> Path:
    """Config and tokenizer of a model of this shape in ``path`` (created): ``--load-format dummy`` draws its
    weights."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, **shape}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_byte_tokenizer(path, words=ModelConfig.from_dir(path).vocab_size - NUM_BYTES - len(SPECIALS))
    return path


def save_random(path: Path, shape: Mapping[str, object], seed: int = 0) -> Path:
    """A model of this shape in bfloat16 in ``path`` (created, unless it is there): norms at 1, biases at 0,
    matrices scaled so that activations neither fade nor blow up."""
    if (path / "model.safetensors").is_file():
        return path
    save_unfilled(path, shape)
    read = ModelConfig.from_dir(path)
    with torch.device("meta"):
        model = MODEL_CLASSES[read.architecture](read, torch.bfloat16, Parallel.alone(read))
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
