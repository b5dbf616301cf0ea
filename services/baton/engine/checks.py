"""What a request must be to run on a model: whoever sent it, a worker trusts nobody."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.engine.sequence import Sequence
from baton.engine.stop import stop_ids
from baton.request.limits import MAX_BEAMS
from baton.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """For one model."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def check(self, seq: Sequence) -> None:
        """ValueError, saying why, if this sequence could never run."""
        self._check_ids(seq.token_ids)
        given = [seq.first_token, *(fork.first_token for fork in seq.forks)]
        self._check_ids([token for token in given if token is not None])
        self._check_params(seq.params)
        if seq.params.beam_search is not None:
            self._check_beams(seq, seq.params.beam_search.width)

    def _check_params(self, params: SamplingParams) -> None:
        """Like a bad id, a step with nothing to choose from would fail others too."""
        if params.structured_output is not None and not self.eos_token_ids:
            raise ValueError("structured output needs a model with an end-of-sequence token")
        if not params.shapes_logits:
            return
        biased = [token for token, _ in params.logit_bias]
        for named in (biased, params.allowed_token_ids, params.stop_token_ids, *params.bad_word_ids):
            self._check_ids(named)
        if not params.leaves_a_token(self.vocab_size, self.eos_token_ids):
            raise ValueError("allowed_token_ids, bad_words and min_tokens leave no token to be generated")

    def _check_beams(self, seq: Sequence, width: int) -> None:
        params = seq.params
        if not 1 <= width <= MAX_BEAMS:
            raise ValueError(f"a beam search of {width} beams; allowed: 1 to {MAX_BEAMS}")
        if params.shapes_logits or params.structured_output is not None:
            raise ValueError("a beam search takes the model's own distribution: nothing may change it")
        if width + len(stop_ids(params, self.eos_token_ids)) > self.vocab_size:
            raise ValueError(f"a beam search of {width} beams needs as many tokens that do not end an answer")
        if 1 + len(seq.forks) > width:
            raise ValueError(f"{1 + len(seq.forks)} answers are asked for of a beam search of {width} beams")
        given = [seq.first_token, *(fork.first_token for fork in seq.forks), *seq.output_ids]
        if any(token is not None for token in given):
            raise ValueError("outputs were given of a beam search, which tells none before its end")

    def _check_ids(self, token_ids: Collection[int]) -> None:
        """One bad id would fail the whole batch it is computed in."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(
                f"token ids from {min(token_ids)} to {max(token_ids)}; allowed: 0 to {self.vocab_size - 1}"
            )
