"""Beam search: which beginnings of an answer to continue, and which complete answers are best.

The rules are those of transformers' ``generate(num_beams=W, do_sample=False)`` (version 5, ``_beam_search``).
At each step all continuations of the W beams are ranked by the sum of their log-probabilities. A continuation
that ends, with a stopping token or because the answer is as long as it may be, is complete if it is among the
first W, and forgotten otherwise; the best W that do not end are the next beams. Complete answers are compared
by that sum / length ** length_penalty, and the best W are kept.

Pure: candidates in, parents of the next beams out. No tensors, no blocks, no sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.logprobs import Logprobs


class Candidates(NamedTuple):
    """The likeliest tokens after a beam, the best first, with their log-probabilities."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]

    @classmethod
    def needed(cls, width: int, num_stops: int) -> int:
        """The number of candidates that a search must see of each beam: ``width`` that may go on, behind all
        that could end."""
        return width + num_stops

    @classmethod
    def of(cls, told: Logprobs) -> Candidates:
        """The candidates that went over the wire as log-probabilities of one place."""
        return cls(told.top_ids, told.top)

    def told(self) -> Logprobs:
        """The candidates as log-probabilities of one place, that of the likeliest token."""
        return Logprobs(len(self.token_ids), self.logprobs[:1], [1], self.token_ids, self.logprobs)

    def logprobs_of(self, at: int, num_top: int) -> Logprobs:
        """The log-probabilities to tell of the ``at``-th candidate if it is chosen. Equal ones share the
        better rank."""
        chosen = self.logprobs[at]
        rank = 1 + sum(other > chosen for other in self.logprobs[:at])
        top = min(num_top, len(self.token_ids))
        return Logprobs(top, [chosen], [rank], list(self.token_ids[:top]), list(self.logprobs[:top]))


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A beginning of an answer: its last token and the beam before that."""

    before: Beam | None
    token: int
    score: float
    """The sum of the log-probabilities of its tokens."""
    logprobs: Logprobs | None
    """Log-probabilities of the last token, if they are asked for."""

    def path(self) -> list[Beam]:
        """The beams of this answer's tokens, from the first token on."""
        path: list[Beam] = []
        beam: Beam | None = self
        while beam is not None:
            path.append(beam)
            beam = beam.before
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer."""

    beam: Beam
    score: float
    """The score with the length penalty."""
    stopped: bool
    """Whether a stopping token ended the answer; otherwise it is as long as it may be."""


class _Continuation(NamedTuple):
    score: float
    parent: int
    at: int
    """The index among the candidates of its parent."""


class BeamSearch:
    """One search, from the candidates after the prompt to the best answers."""

    def __init__(
        self, params: BeamParams, max_outputs: int, stop_ids: Set[int], num_logprobs: int | None = None
    ) -> None:
        """``num_logprobs``: how many of the likeliest candidates to tell of for each token; None: nothing."""
        self.params = params
        self.max_outputs = max_outputs
        self.stop_ids = stop_ids
        self.num_logprobs = num_logprobs
        self.length = 0
        """The number of tokens of each beam."""
        self.beams: list[Beam] = []
        """The beams, the best first. Empty before the first step."""
        self.hypotheses: list[Hypothesis] = []
        """The complete answers, the best first, at most as many as beams."""
        self.done = False

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """Takes a step: ``candidates`` has one entry for each beam, or at first the one after the prompt.
        Returns the parent of each next beam; empty when the search is over."""
        self.length += 1
        at_end = self.length == self.max_outputs
        beams: list[Beam] = []
        parents: list[int] = []
        for rank, continuation in enumerate(self._ranked(candidates)):
            stopped = candidates[continuation.parent].token_ids[continuation.at] in self.stop_ids
            if stopped or at_end:
                if rank < self.params.width:
                    self._complete(self._beam(continuation, candidates), stopped)
            else:
                beams.append(self._beam(continuation, candidates))
                parents.append(continuation.parent)
            if len(beams) == self.params.width:
                break
        self.beams = beams
        self.done = at_end or self._settled()
        return [] if self.done else parents

    def _ranked(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        scores = [beam.score for beam in self.beams] or [0.0]
        found = [
            _Continuation(score + those.logprobs[at], parent, at)
            for parent, (score, those) in enumerate(zip(scores, candidates, strict=True))
            for at in self._eligible(those)
        ]
        return sorted(found, key=lambda continuation: -continuation.score)

    def _eligible(self, those: Candidates) -> Iterator[int]:
        """The candidates of a beam that may matter: none that ends behind its first W, and no more than W
        others. With many stopping tokens that is a small part."""
        going, width = 0, self.params.width
        for at, token in enumerate(those.token_ids):
            stops = token in self.stop_ids
            if not stops or at < width:
                yield at
            going += not stops
            if going == width:
                break

    def _beam(self, continuation: _Continuation, candidates: Sequence[Candidates]) -> Beam:
        score, parent, at = continuation
        those = candidates[parent]
        told = None if self.num_logprobs is None else those.logprobs_of(at, self.num_logprobs)
        return Beam(self.beams[parent] if self.beams else None, those.token_ids[at], score, told)

    def _complete(self, beam: Beam, stopped: bool) -> None:
        self.hypotheses.append(Hypothesis(beam, self._penalised(beam.score, self.length), stopped))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.width :]

    def _settled(self) -> bool:
        """Whether no beam is worth going on with."""
        if len(self.hypotheses) < self.params.width:
            return False
        early_stopping, penalty = self.params.early_stopping, self.params.length_penalty
        if early_stopping is EarlyStopping.ALWAYS:
            return True
        # Scores are below 0: with a penalty above 0 the longest answer has the best one.
        longest = early_stopping is EarlyStopping.NEVER and penalty > 0
        best = self._penalised(self.beams[0].score, self.max_outputs if longest else self.length)
        return best <= self.hypotheses[-1].score

    def _penalised(self, score: float, length: int) -> float:
        return float(score / length**self.params.length_penalty)
