"""Small tokenizers of the kinds that models have, built on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from baton.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Hello, world! How are you today?",
    "naïve café — 東京 🙂🙃 зима",
    "def main() -> None: print('hello')",
] * 8

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


TOOL_TEMPLATE = (
    "{% if tools %}<|start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Return calls within <tool_call></tool_call>.<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{{ ' ' + message.name if message.role == 'tool' and message.name else '' }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if opens %}<think>\n{% endif %}{% endif %}"
)
"""As Qwen's, in short."""


def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """Like GPT-2's: every byte is a token, so any text round-trips. Ids 0 and 1 are special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken("<added word>", normalized=False)])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2's: words with a leading mark, and byte tokens for what the vocabulary lacks."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "▁the", "▁fox", "▁Hello", "é", "東", "a", "b", "c", "o", "x", ",", "▁▁", "�"]
    vocabulary = {token: index for index, token in enumerate([*tokens, *words])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def unstripped_byte_fallback() -> tokenizers.Tokenizer:
    """Like Gemma's: byte fallback without a mark in front of a text, whose leading spaces stay, and runs of
    spaces and line ends as added tokens."""
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "▁the", "fox", "é", "東", "a", "b", "o", "x", "<", ">", "0"]
    vocabulary = {token: index for index, token in enumerate([*tokens, *words])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"])
    texts = ["\n", "\n\n", "▁▁", "▁▁▁", "<table>"]
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    return backend


def split_byte_level() -> tokenizers.Tokenizer:
    """Like those made from tiktoken's (GLM-4, Phi-4, Granite, Hunyuan, Cohere): byte-level behind a split,
    with normalization, digits one by one, and added tokens that are no special ones and have letters beyond
    ASCII."""
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\s+|\p{L}+|[^\s\p{L}]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    backend.add_special_tokens(["<|assistant|>", "<|end▁of▁turn|>"])
    backend.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in ("<think>", "née là", "<｜tool▁call｜>")]
    )
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """Like BERT's: a decoder that is neither byte-level nor byte fallback."""
    words = ["[UNK]", "[CLS]", "hello", "world", "##ing", "##s", "play", ",", "a"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]"])
    return backend


def write_model_dir(
    directory: Path, backend: tokenizers.Tokenizer, config: dict[str, object] | None = None
) -> Path:
    """A model directory that holds only a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def byte_level_tokenizer(
    directory: Path,
    *,
    chat: bool = True,
    template: str = CHAT_TEMPLATE,
    markers: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> Tokenizer:
    """A loaded byte-level tokenizer, with a chat template unless ``chat`` is false, with ``markers`` as
    further special tokens, and with ``texts`` as further tokens that are no special ones."""
    config: dict[str, object] = {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    if chat:
        config["chat_template"] = template
    backend = byte_level()
    backend.add_special_tokens(list(markers))
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    return Tokenizer.from_dir(write_model_dir(directory, backend, config))
