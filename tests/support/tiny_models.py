"""Tiny random models of every family, saved as Hugging Face directories, and transformers as their oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
CONTEXT = 1024
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHOICE_BIAS = "e_score_correction_bias"
"""What families call the bias that is added to experts' scores for the choice alone."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPE: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
)


@dataclass(frozen=True)
class Recipe:
    """A tiny model of a family."""

    config: Callable[..., PretrainedConfig]
    overrides: Mapping[str, object]
    shard_size: str = "1GB"

    def __call__(self, path: Path) -> Path:
        """Save the model in ``path`` (created) and return it."""
        config = self.config(**{**SHAPE, **self.overrides})
        model = _auto_model(config).from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        randomize(model)
        ends = GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, IM_END])  # type: ignore[no-untyped-call]
        model.generation_config = ends
        model.save_pretrained(path, max_shard_size=self.shard_size)
        save_byte_tokenizer(path)
        return path


def rope_of(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **parameters}


ModelDir = Callable[[str], Path]
"""Where the tiny model of a name lies."""

TINY_MODELS: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "llama": Recipe(LlamaConfig, {}),
        "llama-tied-mha": Recipe(LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        "llama-biased-mqa": Recipe(
            LlamaConfig,
            {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        ),
        "llama-wide-heads": Recipe(LlamaConfig, {"head_dim": 48, "rms_norm_eps": 1e-5}),
        "llama-linear": Recipe(LlamaConfig, {"rope_parameters": rope_of("linear", factor=2.0)}),
        "llama-dynamic": Recipe(
            LlamaConfig, {"rope_parameters": rope_of("dynamic", factor=4.0), "max_position_embeddings": 256}
        ),
        "llama-llama3": Recipe(
            LlamaConfig,
            {
                "rope_parameters": rope_of(
                    "llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=256,
                )
            },
        ),
        "llama-yarn": Recipe(
            LlamaConfig,
            {"rope_parameters": rope_of("yarn", factor=4.0, original_max_position_embeddings=256)},
        ),
        "llama-yarn-mscale": Recipe(
            LlamaConfig,
            {
                "rope_parameters": rope_of(
                    "yarn",
                    factor=4.0,
                    original_max_position_embeddings=256,
                    mscale=1.5,
                    mscale_all_dim=0.7,
                    beta_fast=24.0,
                    beta_slow=2.0,
                    truncate=False,
                )
            },
        ),
        "llama-sharded": Recipe(LlamaConfig, {}, shard_size="100KB"),
        "mistral": Recipe(MistralConfig, {"sliding_window": 24, "num_key_value_heads": 1}),
        "mistral-no-window": Recipe(MistralConfig, {"sliding_window": None}),
        "qwen2": Recipe(Qwen2Config, {"tie_word_embeddings": True}),
        "qwen2-window": Recipe(
            Qwen2Config, {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}
        ),
        "qwen3": Recipe(Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
        "qwen3-biased-window": Recipe(
            Qwen3Config,
            {
                "head_dim": 16,
                "num_attention_heads": 6,
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 33,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
    }
)
"""Name -> builder: ``TINY_MODELS["qwen3"](tmp_path / "qwen3")`` saves the model there and returns the path.

All have 320 token ids, of which a byte's value is its token and 256 to 259 are ``SPECIALS``; a context of
1024; and weights of which every one matters (biases and norms are random too)."""


FINAL_NORMS = tuple(
    f"model.{name}.weight"
    for name in ("norm", "language_model.norm", "norm_f", "final_layernorm", "embedding_norm")
)


def randomize(model: PreTrainedModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noise(parameter: Tensor) -> Tensor:
        return torch.randn(parameter.shape, generator=generator)

    # A tied embedding must be small beside what the layers add, or the model only echoes its last token.
    embedding = 0.1 if model.config.tie_word_embeddings else 0.5
    embedding /= getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)  # Gemma's
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith(("norm.weight", "norm_f.weight", ".D")):
                # As they are at first, norms change nothing: their weights are 1, or 0 if 1 is added to them.
                offset = 1 - parameter.mean()
                # Wide logits (standard deviation about 4): greedy choices are clear.
                size = 0.5 / embedding if name in FINAL_NORMS else 1.0
                parameter.copy_((1 + 0.3 * noise(parameter)) * size - offset)
            elif name.endswith(CHOICE_BIAS):
                parameter.copy_(0.2 * noise(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * noise(parameter))
            elif name.endswith(("embed_tokens.weight", "model.embeddings.weight", "lm_head.weight")):
                parameter.copy_(embedding * noise(parameter))
            elif parameter.dim() > 1:
                parameter.copy_(1.3 * parameter.shape[1] ** -0.5 * noise(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith((CHOICE_BIAS, "expert_bias")):
                buffer.copy_(0.2 * noise(buffer))


def save_byte_tokenizer(path: Path, words: int = 0) -> None:
    """A tokenizer whose ids are byte values, then ``words`` numbers (which text never becomes), then
    ``SPECIALS``, with a chat template."""
    tokens = [*_byte_alphabet(), *(f"Ġ{number}" for number in range(words))]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(special, normalized=False, special=True) for special in SPECIALS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_bos_token": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def save_llama(path: Path, **overrides: object) -> Path:
    """A Llama with random weights, of the tiny shape but for ``overrides``, in ``path`` (created)."""
    return Recipe(LlamaConfig, overrides)(path)


def save_shape(path: Path, **config: object) -> Path:
    """A Llama of this shape without weights, in ``path`` (created): ``--load-format dummy`` draws them."""
    path.mkdir(parents=True)
    whole = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, **config}
    (path / "config.json").write_text(json.dumps(whole, indent=2))
    save_byte_tokenizer(path)
    return path


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: Latin-1's printable ones stand for themselves, the others
    for what follows 255, in order."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


@lru_cache(maxsize=4)
def load_oracle(path: Path, dtype: str = "float32") -> PreTrainedModel:
    """The model in transformers, with its plainest attention and experts."""
    config = AutoConfig.from_pretrained(path)
    model: PreTrainedModel = _auto_model(config).from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    )
    return model


def _auto_model(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    has_encoder = config.get_text_config() is not config
    return AutoModelForImageTextToText if has_encoder else AutoModelForCausalLM


@torch.inference_mode()
def oracle_logits(path: Path, ids: Sequence[int], dtype: str = "float32") -> Tensor:
    """Logits of every position, [len(ids), vocab], from one pass over the whole sequence."""
    logits: Tensor = load_oracle(path, dtype)(torch.tensor([ids]), use_cache=False).logits
    return logits[0].float()


@torch.inference_mode()
def oracle_greedy(
    path: Path,
    prompt_ids: Sequence[int],
    n: int,
    dtype: str = "float32",
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[list[int], float]:
    """The n ids that greedy decoding gives (end tokens do not end it), and the smallest distance along the
    way between the best and the second-best logit: the error that would be needed to change an id.

    ``processors`` are transformers' own, applied to the logits in this order."""
    model = load_oracle(path, dtype)
    if model.config.get_text_config().rope_parameters.get("rope_type") == "dynamic":
        load_oracle.cache_clear()  # its angles depend on the longest sequence it has seen
        model = load_oracle(path, dtype)
    ids: list[int] = []
    margin = float("inf")
    step, cache = torch.tensor([list(prompt_ids)]), None
    for _ in range(n):
        output = model(step, past_key_values=cache, use_cache=True)
        scores = output.logits[:, -1].float()
        for processor in processors:
            scores = processor(torch.tensor([[*prompt_ids, *ids]]), scores)
        best, second = scores[0].topk(2).values.tolist()
        margin = min(margin, best - second)
        ids.append(int(scores[0].argmax()))
        step, cache = torch.tensor([[ids[-1]]]), output.past_key_values
    return ids, margin
