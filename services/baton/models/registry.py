"""The model families by ``architectures[0]``. Imports no torch: the router uses it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One architecture."""

    read: str
    """Module and attribute of the function from ``Fields`` to ``ModelConfig``, imported when it is used."""
    checkpoints: tuple[str, ...]
    """Examples on the Hugging Face hub."""
    text_config: bool = False
    """Whether the language model's fields lie in ``text_config``, beside an image or audio encoder's, which
    is left out."""
    ignored: tuple[str, ...] = ()
    """Parts of the names of tensors that belong to what is left out."""


def _family(name: str, *checkpoints: str) -> ModelFamily:
    return ModelFamily(read=f"baton.models.families.{name}:read", checkpoints=checkpoints)


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": _family("llama", "meta-llama/Llama-3.1-8B-Instruct"),
        "MistralForCausalLM": _family("mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
        "Qwen2ForCausalLM": _family("qwen2", "Qwen/Qwen2.5-7B-Instruct"),
        "Qwen3ForCausalLM": _family("qwen3", "Qwen/Qwen3-8B"),
    }
)
"""The architectures Baton serves."""
