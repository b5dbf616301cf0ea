"""Drafters that know too much, or nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from baton.speculation.drafter import TokenSequence
from tests.support.fake_engine import state_of


class ScriptedDrafter:
    """Drafts what it was told will follow: for each prompt the outputs that are expected, in which every
    ``fault``-th place is wrong (0: none is)."""

    wants_hidden = False

    def __init__(self, fault: int = 0) -> None:
        self.fault = fault
        self.script: dict[tuple[int, ...], list[int]] = {}
        self.forgotten: list[TokenSequence] = []

    def expect(self, prompt_ids: Sequence[int], outputs: Sequence[int]) -> None:
        self.script[tuple(prompt_ids)] = list(outputs)

    def draft(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[list[int]]:
        return [self._one(seq, limit) for seq, limit in zip(sequences, limits, strict=True)]

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        raise AssertionError("it wants none")

    def forget(self, sequence: TokenSequence) -> None:
        self.forgotten.append(sequence)

    def _one(self, sequence: TokenSequence, limit: int) -> list[int]:
        outputs = self.script.get(tuple(sequence.token_ids[: sequence.num_prompt]), [])
        at = sequence.num_tokens - sequence.num_prompt
        return [
            token if not self.fault or place % self.fault else token + 1
            for place, token in enumerate(outputs[at : at + limit], start=at)
        ]


class HostileDrafter:
    """Drafts anything: what is right, tokens that the sequence has, tokens that are none, too many, or
    nothing. With hidden states, those of ``FakeModel``, it sees whether they are of the tokens they are said
    to be of."""

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        *,
        wants_hidden: bool = False,
        truth: Callable[[TokenSequence], Sequence[int]] = lambda sequence: (),
    ) -> None:
        """``truth``: the tokens that will follow a sequence, as far as it is to know."""
        self.wants_hidden = wants_hidden
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._truth = truth
        self.alive: set[TokenSequence] = set()

    def draft(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[list[int]]:
        assert all(limit >= 1 for limit in limits)
        self.alive.update(sequences)
        return [self._one(seq, limit) for seq, limit in zip(sequences, limits, strict=True)]

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        self.alive.add(sequence)
        assert len(hidden) >= 1
        assert 0 <= first <= first + len(hidden) <= sequence.num_tokens
        for at, state in enumerate(hidden[:, 0].tolist(), start=first):
            assert state == state_of(sequence.token_ids[: at + 1])

    def forget(self, sequence: TokenSequence) -> None:
        self.alive.discard(sequence)

    def _one(self, sequence: TokenSequence, limit: int) -> list[int]:
        choose = self._random
        kinds = (
            lambda: choose.choice(sequence.token_ids),
            lambda: choose.randrange(self._vocab_size),
            lambda: choose.choice((-1, self._vocab_size, 2**40)) if choose.random() < 0.1 else 0,
        )
        right = list(self._truth(sequence)[: choose.randint(0, limit)])
        return right + [choose.choice(kinds)() for _ in range(choose.randint(0, limit + 3))]
