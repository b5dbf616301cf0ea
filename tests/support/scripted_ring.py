"""A ring that answers a prompt's text with a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from baton.text.tokenizer import Tokenizer
from tests.support.fake_ring import MODEL, Call, FakeRing


def ring_of(tokenizer: Tokenizer, answer: Callable[[str], str] | str, per_chunk: int = 1) -> FakeRing:
    """``answer`` is told the prompt, special tokens included."""

    def ids(call: Call) -> list[int]:
        prompt = tokenizer.decode(call.prompt_ids, skip_special_tokens=False)
        return tokenizer.encode(
            answer if isinstance(answer, str) else answer(prompt), add_special_tokens=False
        )

    model = dataclasses.replace(MODEL, max_model_len=4096, vocab_size=tokenizer.vocab_size)
    return FakeRing(ids, model=model, ends=True, per_chunk=per_chunk)


def prompt_of(tokenizer: Tokenizer, ring: FakeRing) -> str:
    """The prompt that the ring was given last."""
    return tokenizer.decode(ring.calls[-1].prompt_ids, skip_special_tokens=False)
