"""What the engine asks of whoever computes its steps. Imports no torch: a step can be simulated."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.engine.beams import Candidates
from baton.engine.scheduler import ScheduledBatch
from baton.engine.sequence import Sequence
from baton.grammar.compiler import Grammar
from baton.logprobs import Logprobs
from baton.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.guidance import Guide
    from baton.engine.logits import LogitRules
    from baton.parallel.ranks import Ranks


class Sampled(NamedTuple):
    """A token, with its log-probabilities if they were asked for."""

    token: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found out, by sequence."""

    tokens: dict[Sequence, list[Sampled]] = field(default_factory=dict)
    """The next token of those that were due one; with the first one, those of its forks behind it."""
    verified: dict[Sequence, list[Sampled]] = field(default_factory=dict)
    """The tokens that follow those that had drafts: the accepted ones and one more."""
    prompt_logprobs: dict[Sequence, Logprobs] = field(default_factory=dict)
    """Of the prompt tokens that follow the step's, for those that ask."""
    candidates: dict[Sequence, Candidates] = field(default_factory=dict)
    """What may follow those that are due a token which their beam search chooses."""
    errors: dict[Sequence, str] = field(default_factory=dict)
    """Why those got no token that were due one."""
    hidden: Tensor | None = None
    """[T, H]: the hidden states of the step's tokens, if the runner ``keeps_hidden``."""


class Runner(Protocol):
    """Computes steps, and owns the bytes of the KV pool. One thread runs it at a time."""

    ranks: Ranks | None
    """The other processes that the model is split over."""
    keeps_hidden: bool
    """Whether steps give their hidden states, for a drafter."""

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Computes a step and what it yields. The step's KV is in the pool on return."""

    def rules(
        self, params: SamplingParams, prompt_ids: Items[int], eos_token_ids: frozenset[int]
    ) -> LogitRules | None:
        """What these parameters do to a sequence's logits; None: nothing."""

    def guide(self, grammar: Grammar, params: SamplingParams, eos_token_ids: frozenset[int]) -> Guide:
        """Follows a sequence through the grammar of its structured output."""

    def enter(self) -> None:
        """The calling thread runs the steps from now on."""

    def leave(self) -> None:
        """The calling thread runs no more of them."""
