"""The tiny random models of every family, by name and by architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.tiny_dense import DENSE
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_mambas import MAMBAS
from tests.support.tiny_mixtures import MIXTURES
from tests.support.tiny_models import TINY_MODELS
from tests.support.tiny_states import STATES

FAMILY_MODELS: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {**TINY_MODELS, **DENSE, **MIXTURES, **LATENTS, **STATES, **MAMBAS}
)
"""Name -> builder, as ``TINY_MODELS``."""

MODELS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "LlamaForCausalLM": tuple(name for name in TINY_MODELS if name.startswith("llama")),
        "MistralForCausalLM": ("mistral", "mistral-no-window"),
        "Qwen2ForCausalLM": ("qwen2", "qwen2-window"),
        "Qwen3ForCausalLM": ("qwen3", "qwen3-biased-window"),
        "Cohere2ForCausalLM": ("cohere2", "cohere2-biased-mqa"),
        "Ernie4_5ForCausalLM": ("ernie4_5", "ernie4_5-biased"),
        "Gemma2ForCausalLM": ("gemma2", "gemma2-uncapped-untied"),
        "Gemma3ForCausalLM": ("gemma3",),
        "Gemma3ForConditionalGeneration": ("gemma3-with-encoder",),
        "GlmForCausalLM": ("glm",),
        "Glm4ForCausalLM": ("glm4", "glm4-mqa-biased"),
        "GraniteForCausalLM": ("granite", "granite-biased-tied"),
        "HunYuanDenseV1ForCausalLM": ("hunyuan", "hunyuan-mha-biased"),
        "InternLM3ForCausalLM": ("internlm3",),
        "MinistralForCausalLM": ("ministral",),
        "Ministral3ForCausalLM": ("ministral3",),
        "Mistral3ForConditionalGeneration": (
            "mistral3-of-ministral3",
            "mistral3-of-mistral",
            "mistral4-with-encoder",
        ),
        "Olmo2ForCausalLM": ("olmo2", "olmo2-gqa-biased"),
        "Olmo3ForCausalLM": ("olmo3",),
        "Phi3ForCausalLM": ("phi3-longrope", "phi3", "phi3-partial"),
        "SeedOssForCausalLM": ("seed-oss", "seed-oss-biased"),
        "SmolLM3ForCausalLM": ("smollm3", "smollm3-window"),
        "Starcoder2ForCausalLM": ("starcoder2", "starcoder2-unbiased"),
        "MixtralForCausalLM": ("mixtral", "mixtral-window"),
        "Qwen2MoeForCausalLM": ("qwen2-moe", "qwen2-moe-dense-layers"),
        "Qwen3MoeForCausalLM": ("qwen3-moe", "qwen3-moe-dense-layers"),
        "Glm4MoeForCausalLM": ("glm4-moe", "glm4-moe-normed"),
        "MiniMaxM2ForCausalLM": ("minimax-m2", "minimax-m2-mqa"),
        "HYV3ForCausalLM": ("hy-v3", "hy-v3-biased"),
        "HunYuanMoEV1ForCausalLM": ("hunyuan-moe", "hunyuan-moe-alpha"),
        "GptOssForCausalLM": ("gpt-oss", "gpt-oss-plain-rope"),
        "Llama4ForCausalLM": ("llama4", "llama4-unnormed"),
        "Llama4ForConditionalGeneration": ("llama4-with-encoder",),
        "PhimoeForCausalLM": ("phimoe", "phimoe-window"),
        "GraniteMoeForCausalLM": ("granite-moe",),
        "GraniteMoeSharedForCausalLM": ("granite-moe-shared",),
        "OlmoeForCausalLM": ("olmoe", "olmoe-biased"),
        "Ernie4_5_MoeForCausalLM": ("ernie45-moe", "ernie45-moe-biased"),
        "Qwen3NextForCausalLM": ("qwen3-next", "qwen3-next-odd"),
        "KimiLinearForCausalLM": ("kimi-linear", "kimi-linear-odd"),
        "BailingMoeLinearV2ForCausalLM": ("ring-linear", "ring-linear-odd"),
        "Qwen3_5ForCausalLM": ("qwen3-5",),
        "Qwen3_5ForConditionalGeneration": ("qwen3-5-with-encoder",),
        "Qwen3_5MoeForCausalLM": ("qwen3-5-moe",),
        "Qwen3_5MoeForConditionalGeneration": ("qwen3-5-moe-with-encoder",),
        "DeepseekV2ForCausalLM": ("deepseek-v2", "deepseek-v2-lite"),
        "DeepseekV3ForCausalLM": ("deepseek-v3", "deepseek-v3-halves"),
        "KimiK25ForConditionalGeneration": ("kimi-k25",),
        "Mistral4ForCausalLM": ("mistral4",),
        "MiniCPM3ForCausalLM": ("minicpm3", "minicpm3-direct-queries"),
        "Glm4MoeLiteForCausalLM": ("glm4-moe-lite",),
        "YoutuForCausalLM": ("youtu",),
        "NemotronHForCausalLM": tuple(name for name in MAMBAS if name.startswith("nemotron-h")),
        "GraniteMoeHybridForCausalLM": ("granite-hybrid", "granite-hybrid-dense"),
        "FalconH1ForCausalLM": ("falcon-h1", "falcon-h1-normed", "falcon-h1-gated-first"),
        "BambaForCausalLM": ("bamba", "bamba-biased"),
        "Lfm2ForCausalLM": ("lfm2", "lfm2-biased"),
        "Lfm2MoeForCausalLM": ("lfm2-moe", "lfm2-moe-unbiased"),
    }
)
"""Architecture -> the names of its tiny models. The first stands for all of them where tests are few."""
