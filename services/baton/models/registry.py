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
    module, _, function = name.partition(":")
    return ModelFamily(read=f"baton.models.families.{module}:{function or 'read'}", checkpoints=checkpoints)


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": _family("llama", "meta-llama/Llama-3.1-8B-Instruct"),
        "MistralForCausalLM": _family("mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
        "Qwen2ForCausalLM": _family("qwen2", "Qwen/Qwen2.5-7B-Instruct"),
        "Qwen3ForCausalLM": _family("qwen3", "Qwen/Qwen3-8B"),
        "MixtralForCausalLM": _family("mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        "Qwen2MoeForCausalLM": _family("qwen2_moe", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
        "Qwen3MoeForCausalLM": _family("qwen3_moe", "Qwen/Qwen3-30B-A3B"),
        "Glm4MoeForCausalLM": _family("glm4_moe", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.7"),
        "MiniMaxM2ForCausalLM": _family("minimax_m2", "MiniMaxAI/MiniMax-M2"),
        "HYV3ForCausalLM": _family("hy_v3", "tencent/Hy3-preview"),
        "HunYuanMoEV1ForCausalLM": _family("hunyuan_moe", "tencent/Hunyuan-A13B-Instruct"),
        "GptOssForCausalLM": _family("gpt_oss", "unsloth/gpt-oss-20b-BF16"),
        "Llama4ForCausalLM": _family("llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        "Llama4ForConditionalGeneration": ModelFamily(
            read="baton.models.families.llama4:read",
            checkpoints=("meta-llama/Llama-4-Scout-17B-16E-Instruct",),
            text_config=True,
            ignored=("vision_model.", "multi_modal_projector."),
        ),
        "PhimoeForCausalLM": _family("phimoe", "microsoft/Phi-3.5-MoE-instruct"),
        "GraniteMoeForCausalLM": _family("granite_moe", "ibm-granite/granite-3.1-3b-a800m-instruct"),
        "GraniteMoeSharedForCausalLM": _family(
            "granite_moe:read_shared", "ibm-research/moe-7b-1b-active-shared-experts"
        ),
        "OlmoeForCausalLM": _family("olmoe", "allenai/OLMoE-1B-7B-0924-Instruct"),
        "Ernie4_5_MoeForCausalLM": _family("ernie45_moe", "baidu/ERNIE-4.5-21B-A3B-PT"),
    }
)
"""The architectures Baton serves."""
