"""The interface between the engine and the runner of its steps. Imports no torch: a step can be simulated."""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.core.logprobs import Logprobs
from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.bad_words import BadWords
from baton.engine.sampling.beams import Candidates
from baton.engine.scheduler import ScheduledBatch
from baton.engine.sequence import Sequence
from baton.grammar.table import Grammar

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.sampling.guidance import Guide
    from baton.engine.sampling.logits import LogitRules
    from baton.parallel.ranks import Ranks


class Sampled(NamedTuple):
    """A token, with its log-probabilities if the request asked for them."""

    token: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, by sequence."""

    tokens: dict[Sequence, list[Sampled]] = field(default_factory=dict)
    """The next token of each sequence that was due one; with the first token, the first tokens of its forks
    behind it."""
    verified: dict[Sequence, list[Sampled]] = field(default_factory=dict)
    """The next tokens of each sequence that had drafts: the accepted drafts and one more token."""
    prompt_logprobs: dict[Sequence, Logprobs] = field(default_factory=dict)
    """Log-probabilities of the prompt tokens that follow the step's, for sequences that ask."""
    candidates: dict[Sequence, Candidates] = field(default_factory=dict)
    """The candidates of each sequence that was due a token which its beam search chooses."""
    errors: dict[Sequence, str] = field(default_factory=dict)
    """The reason for each sequence that was due a token and got none."""
    hidden: Tensor | None = None
    """[T, H]: the hidden states of the step's tokens, if the runner ``keeps_hidden``."""


class PendingStep(Protocol):
    """A step that was launched. Its methods are called once, in this order."""

    def choose(self) -> None:
        """Launches the choice of the step's tokens. All tokens before them are in their sequences by now."""

    def result(self) -> StepResult:
        """Waits for the results. The step's KV is in the pool on return."""


class Launcher(Protocol):
    """Launches a step while the one before is under way, whose tokens it takes from the device. ``choose`` of
    the one before has been called by then."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Begins to compute a step."""


class Runner(Protocol):
    """Computes steps, and owns the bytes of the KV pool. One thread runs it at a time."""

    launcher: Launcher | None
    """None: each step is computed as a whole, by ``run``."""

    ranks: Ranks | None
    """The other processes that the model is split over."""
    keeps_hidden: bool
    """Whether steps give their hidden states, for a drafter."""

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Computes a step and its results. The step's KV is in the pool on return."""

    def rules(
        self,
        params: ResolvedSampling,
        prompt_ids: Items[int],
        eos_token_ids: frozenset[int],
        bad_words: Future[BadWords] | None = None,
    ) -> LogitRules | None:
        """The changes that these parameters make to a sequence's logits; None: no change. ``bad_words``:
        those of ``params``, done before the sequence's first step; None: they are prepared at once."""

    def guide(self, grammar: Grammar, params: ResolvedSampling, eos_token_ids: frozenset[int]) -> Guide:
        """The guide that follows a sequence through the grammar of its structured output."""

    def enter(self) -> None:
        """The calling thread runs the steps from now on."""

    def leave(self) -> None:
        """The calling thread runs no more steps."""
