"""What simulated workers answer, written down again without pool, scheduler or steps."""

from __future__ import annotations

from collections.abc import Sequence

from baton.simulated.main import FIRST_WORD
from baton.simulated.runner import FACTOR, mixed, salt_of, word_before_all


def simulated_answer(
    prompt: Sequence[int],
    length: int,
    vocab_size: int,
    *,
    seed: int = 0,
    first: int = FIRST_WORD,
    revision: str | None = None,
) -> list[int]:
    """The tokens of an answer that does not end by itself; ``seed`` 0 is greedy decoding."""
    state = Told(prompt, vocab_size, seed=seed, first=first, revision=revision)
    outputs: list[int] = []
    while len(outputs) < length:
        outputs.append(state.next)
        state.take(outputs[-1])
    return outputs


class Told:
    """What a worker of one revision would say next, whoever said what came before."""

    def __init__(
        self,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        seed: int = 0,
        first: int = FIRST_WORD,
        revision: str | None = None,
    ) -> None:
        self._salt = salt_of(revision)
        self._draw = mixed(seed) ^ self._salt
        self._first, self._words = first, vocab_size - first
        self._word = word_before_all(self._salt)
        for token in prompt:
            self.take(token)

    def take(self, token: int) -> None:
        self._word = (self._word * FACTOR + token + 1) % 2**64

    @property
    def next(self) -> int:
        return self._first + mixed(self._word ^ self._draw) % self._words
