"""Which module serves which ``architectures[0]``. How each config.json is read: ``config.FAMILIES``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.models.base import CausalLM
from baton.models.llama import LlamaForCausalLM
from baton.models.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: Mapping[str, type[CausalLM]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": LlamaForCausalLM,
        "Qwen2ForCausalLM": LlamaForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
    }
)
