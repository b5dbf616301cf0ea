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


def _family(name: str, *checkpoints: str, read: str = "read") -> ModelFamily:
    return ModelFamily(read=f"baton.models.families.{name}:{read}", checkpoints=checkpoints)


def _text_model(name: str, *checkpoints: str, read: str = "read") -> ModelFamily:
    """A family that is a part of a model that reads images, too."""
    return ModelFamily(
        read=f"baton.models.families.{name}:{read}",
        checkpoints=checkpoints,
        text_config=True,
        ignored=("vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector."),
    )


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": _family("llama", "meta-llama/Llama-3.1-8B-Instruct"),
        "MistralForCausalLM": _family("mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
        "Qwen2ForCausalLM": _family("qwen2", "Qwen/Qwen2.5-7B-Instruct"),
        "Qwen3ForCausalLM": _family("qwen3", "Qwen/Qwen3-8B"),
        "Cohere2ForCausalLM": _family(
            "cohere2", "CohereLabs/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-a-03-2025"
        ),
        "Ernie4_5ForCausalLM": _family("ernie4_5", "baidu/ERNIE-4.5-0.3B-PT"),
        "Gemma2ForCausalLM": _family("gemma2", "google/gemma-2-9b-it"),
        "Gemma3ForCausalLM": _family("gemma3", "google/gemma-3-1b-it"),
        "Gemma3ForConditionalGeneration": _text_model("gemma3", "google/gemma-3-27b-it"),
        "GlmForCausalLM": _family("glm4", "zai-org/glm-4-9b-chat-hf"),
        "Glm4ForCausalLM": _family("glm4", "zai-org/GLM-4-32B-0414", read="read_0414"),
        "GraniteForCausalLM": _family("granite", "ibm-granite/granite-3.3-8b-instruct"),
        "HunYuanDenseV1ForCausalLM": _family("hunyuan", "tencent/Hunyuan-7B-Instruct"),
        "InternLM3ForCausalLM": _family("internlm3", "internlm/internlm3-8b-instruct"),
        "MinistralForCausalLM": _family("mistral", "mistralai/Ministral-8B-Instruct-2410"),
        "Ministral3ForCausalLM": _family("ministral3"),
        "Mistral3ForConditionalGeneration": _text_model(
            "ministral3",
            "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
            "mistralai/Ministral-3-8B-Instruct-2512-BF16",
            "mistralai/Mistral-Small-4-119B-2603",
            read="read_mistral3",
        ),
        "Olmo2ForCausalLM": _family("olmo2", "allenai/OLMo-2-1124-13B-Instruct"),
        "Olmo3ForCausalLM": _family("olmo2", "allenai/Olmo-3-7B-Instruct", read="read_olmo3"),
        "Phi3ForCausalLM": _family("phi3", "microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4"),
        "SeedOssForCausalLM": _family("seed_oss", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
        "SmolLM3ForCausalLM": _family("smollm3", "HuggingFaceTB/SmolLM3-3B"),
        "Starcoder2ForCausalLM": _family("starcoder2", "bigcode/starcoder2-15b"),
        "MixtralForCausalLM": _family("mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        "Qwen2MoeForCausalLM": _family("qwen2_moe", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
        "Qwen3MoeForCausalLM": _family("qwen3_moe", "Qwen/Qwen3-30B-A3B"),
        "Glm4MoeForCausalLM": _family("glm4_moe", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.7"),
        "MiniMaxM2ForCausalLM": _family("minimax_m2", "MiniMaxAI/MiniMax-M2"),
        "HYV3ForCausalLM": _family("hy_v3", "tencent/Hy3-preview"),
        "HunYuanMoEV1ForCausalLM": _family("hunyuan_moe", "tencent/Hunyuan-A13B-Instruct"),
        "GptOssForCausalLM": _family("gpt_oss", "unsloth/gpt-oss-20b-BF16"),
        "Llama4ForCausalLM": _family("llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        "Llama4ForConditionalGeneration": _text_model("llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        "PhimoeForCausalLM": _family("phimoe", "microsoft/Phi-3.5-MoE-instruct"),
        "GraniteMoeForCausalLM": _family("granite_moe", "ibm-granite/granite-3.1-3b-a800m-instruct"),
        "GraniteMoeSharedForCausalLM": _family(
            "granite_moe", "ibm-research/moe-7b-1b-active-shared-experts", read="read_shared"
        ),
        "OlmoeForCausalLM": _family("olmoe", "allenai/OLMoE-1B-7B-0924-Instruct"),
        "Ernie4_5_MoeForCausalLM": _family("ernie4_5_moe", "baidu/ERNIE-4.5-21B-A3B-PT"),
        "Qwen3NextForCausalLM": _family("qwen3_next", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        "KimiLinearForCausalLM": _family("kimi_linear", "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
        "BailingMoeLinearV2ForCausalLM": _family(
            "ring_linear", "inclusionAI/Ring-mini-linear-2.0", "inclusionAI/Ring-flash-linear-2.0"
        ),
        "Qwen3_5ForCausalLM": _family("qwen3_5"),
        "Qwen3_5ForConditionalGeneration": _text_model("qwen3_5", "Qwen/Qwen3.5-27B"),
        "Qwen3_5MoeForCausalLM": _family("qwen3_5", read="read_moe"),
        "Qwen3_5MoeForConditionalGeneration": _text_model(
            "qwen3_5", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-397B-A17B", read="read_moe"
        ),
        "DeepseekV2ForCausalLM": _family("deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
        "DeepseekV3ForCausalLM": _family(
            "deepseek_v3",
            "deepseek-ai/DeepSeek-V3",
            "deepseek-ai/DeepSeek-R1",
            "moonshotai/Kimi-K2-Instruct",
            "moonshotai/Moonlight-16B-A3B-Instruct",
        ),
        "KimiK25ForConditionalGeneration": _text_model("deepseek_v3", "moonshotai/Kimi-K2.5"),
        "Mistral4ForCausalLM": _family("mistral4"),
        "MiniCPM3ForCausalLM": _family("minicpm3", "openbmb/MiniCPM3-4B"),
        "Glm4MoeLiteForCausalLM": _family("deepseek_v3", "zai-org/GLM-4.7-Flash", read="read_glm4_moe_lite"),
        "YoutuForCausalLM": _family("deepseek_v3", "tencent/Youtu-LLM-2B", read="read_youtu"),
        "NemotronHForCausalLM": _family(
            "nemotron_h", "nvidia/Nemotron-H-8B-Base-8K", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
        ),
        "GraniteMoeHybridForCausalLM": _family(
            "granite_hybrid", "ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-1b"
        ),
        "FalconH1ForCausalLM": _family("falcon_h1", "tiiuae/Falcon-H1-7B-Instruct"),
        "BambaForCausalLM": _family("bamba", "ibm-ai-platform/Bamba-9B-v2"),
        "Lfm2ForCausalLM": _family("lfm2", "LiquidAI/LFM2-1.2B"),
        "Lfm2MoeForCausalLM": _family("lfm2", "LiquidAI/LFM2-8B-A1B", read="read_moe"),
    }
)
"""The architectures Baton serves."""

_GEMMA4 = (
    "not served: its layers with a window and those without have heads of different sizes, and the KV pool "
    "has blocks of one shape"
)
_GEMMA3N = "not served: it has embeddings of its own in each layer, and layers that use the KV of others"
_INDEXER = "not served: its attention reads the tokens that an indexer chooses, whose keys nothing keeps"
UNSERVED: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3nForCausalLM": _GEMMA3N,
        "Gemma3nForConditionalGeneration": _GEMMA3N,
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": _GEMMA4,
        "DeepseekV32ForCausalLM": _INDEXER,
        "DeepseekV4ForCausalLM": _INDEXER,
        "GlmMoeDsaForCausalLM": _INDEXER,
        "MiniMaxM3SparseForConditionalGeneration": _INDEXER,
        "MiniMaxM3VLForCausalLM": _INDEXER,
        "MistralLarge4ForConditionalGeneration": _INDEXER,
    }
)
"""Architectures that are near to served ones, with the reason why they are refused."""
