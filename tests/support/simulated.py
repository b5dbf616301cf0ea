"""What simulated workers answer, written down again without pool, scheduler or steps."""

from __future__ import annotations

from collections.abc import Sequence

from baton.simulated.main import FIRST_WORD
from baton.simulated.runner import FACTOR, mixed


def simulated_answer(
    prompt: Sequence[int], length: int, vocab_size: int, *, seed: int = 0, first: int = FIRST_WORD
) -> list[int]:
    """The tokens of an answer that does not end by itself; ``seed`` 0 is greedy decoding."""
    word = 1
    for token in prompt:
        word = (word * FACTOR + token + 1) % 2**64
    outputs: list[int] = []
    while len(outputs) < length:
        outputs.append(first + mixed(word ^ mixed(seed)) % (vocab_size - first))
        word = (word * FACTOR + outputs[-1] + 1) % 2**64
    return outputs
