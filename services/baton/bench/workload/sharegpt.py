"""Conversations in ShareGPT's format: a JSON list."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from baton.bench.workload.files import read_bytes
from baton.bench.workload.items import Item, WorkloadError
from baton.text.tokenizer import Tokenizer

_FEWEST_TOKENS = 4
"""Fewest tokens of a prompt or an answer; shorter ones are skipped, as in vLLM's benchmark."""


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]


def read_sharegpt(path: Path, count: int, tokenizer: Tokenizer, seed: int) -> list[Item]:
    """Draw ``count`` conversations from a file, or take all if it has fewer: the first turn is the prompt,
    the second gives the answer's length. Raises WorkloadError that names the entry."""
    data = read_bytes(path)
    try:
        conversations = msgspec.json.decode(data, type=list[_Conversation])
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{path}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: is not JSON: {error}") from None
    random.Random(f"sharegpt-{seed}").shuffle(conversations)
    items: list[Item] = []
    for conversation in conversations:
        if len(items) == count:
            break
        if len(conversation.conversations) < 2:
            continue
        prompt, answer = (turn.value for turn in conversation.conversations[:2])
        lengths = len(tokenizer.encode(prompt)), len(tokenizer.encode(answer, add_special_tokens=False))
        if min(lengths) >= _FEWEST_TOKENS:
            items.append(Item(prompt, *lengths))
    if not items:
        raise WorkloadError(
            f"{path}: holds no conversation with a prompt and an answer of {_FEWEST_TOKENS} tokens"
        )
    return items
