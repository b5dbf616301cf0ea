"""The interface of drafters, which guess the next tokens of sequences.

A draft changes how fast tokens come, never which: the engine computes the drafts together with the last token
and keeps those that it would have chosen anyway (``baton.engine.verification``).
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor


class TokenSequence(Hashable, Protocol):
    """The part of an engine's sequence that drafters use. Compared and hashed by identity."""

    token_ids: array[int]
    """Prompt, then outputs, as int64. Grows between calls; a view of it must not outlive a call."""
    max_len: int
    """Tokens at which the sequence ends for length."""

    @property
    def num_prompt(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


class Drafter(Protocol):
    """A source of drafts. Any state that a drafter keeps is derived from the tokens and hidden states that it
    has seen here. So it may get a sequence in the middle (a handoff, a resume, a fork), or one that it was
    not asked about for some steps: it drafts what it can from what it has seen, or nothing.

    All calls come from the thread that steps the engine, without the engine's lock.
    """

    wants_hidden: bool
    """Whether :meth:`observe` is to be called."""

    def draft(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[list[int]]:
        """Drafts up to ``limits[i]`` tokens (at least 1) that may follow the last token of each sequence.
        Called before a step is scheduled. Fewer, or none, is always right."""
        ...

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        """Takes the hidden states of a step; called after it, with ``wants_hidden``. ``hidden`` [n, H] are
        the final hidden states (the input of the LM head) of the sequence's tokens ``first`` to ``first + n -
        1``, which were computed and kept."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """Forgets a sequence that is over. Also called for sequences that the drafter never saw."""
        ...
