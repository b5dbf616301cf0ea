"""A tokenizer built as Qwen3's is, and a tiny model that has it.

Byte-level BPE behind Qwen's split; the ends of turns are special tokens; the markers of tool calls and of
reasoning are added tokens that are no special ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from baton.text.tokenizer import Tokenizer
from tests.support.tiny_models import SHAPE, randomize
from tests.support.tiny_tokenizers import CORPUS, write_model_dir

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CONTEXT = 1024
CONFIG: Callable[..., Qwen3Config] = Qwen3Config
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nA call is JSON within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""A template of Qwen3's kind: it shows tools in JSON, and ends reasoning itself where none is to be."""


def qwen_backend(vocab_size: int = 480) -> tokenizers.Tokenizer:
    """``vocab_size``: without the added tokens, which come behind it."""
    backend = tokenizers.Tokenizer(models.BPE(fuse_unk=False, byte_fallback=False))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, *["a tool_call, think and im_end: the words alone"] * 8], trainer)
    for texts, special in ((SPECIAL, True), (MARKERS, False)):
        added = [tokenizers.AddedToken(text, special=special, normalized=False) for text in texts]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    return backend


def save_qwen_tokenizer(directory: Path, backend: tokenizers.Tokenizer | None = None) -> Tokenizer:
    """Write the tokenizer's files to ``directory`` (created), and load them."""
    config: dict[str, object] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    return Tokenizer.from_dir(write_model_dir(directory, backend or qwen_backend(), config))


def save_qwen_model(directory: Path) -> Tokenizer:
    """Write a tiny Qwen3 of random weights with this tokenizer to ``directory`` (created); return the
    tokenizer."""
    tokenizer = save_qwen_tokenizer(directory)
    ends = [tokenizer.encode(text)[0] for text in ("<|im_end|>", "<|endoftext|>")]
    vocab_size = -(-tokenizer.vocab_size // 32) * 32 + 32  # padded, as those of published models are
    shape = {**SHAPE, "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": ends[0]}
    model = Qwen3ForCausalLM(CONFIG(**shape, head_dim=32, tie_word_embeddings=True))
    randomize(model)
    model.generation_config = GenerationConfig(eos_token_id=ends)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return tokenizer
