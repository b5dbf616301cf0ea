"""The checks that a request must pass to run on a model: a worker trusts no sender."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from baton.core.beam_search import BEAM_WIDTHS, LENGTH_PENALTIES
from baton.core.parameter_spec import ANY, Range
from baton.core.sampling_params import PARAMETERS, ResolvedSampling
from baton.engine.sampling.beams import Candidates
from baton.engine.sequence import Sequence
from baton.engine.stop import stop_ids
from baton.request.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_PROMPT_LOGPROBS

_NUMBERS = tuple(
    (row.name, row.checked_range)
    for row in PARAMETERS.values()
    if row.is_number and row.checked_range is not ANY
)
_BIASES = PARAMETERS["logit_bias"].checked_range


def _check_numbers(params: ResolvedSampling) -> None:
    for name, allowed in _NUMBERS:
        value = getattr(params, name)
        if value is not None and value not in allowed:
            raise _out_of(allowed, name, value)
    for token, bias in params.logit_bias:
        if bias not in _BIASES:
            raise _out_of(_BIASES, f"logit_bias[{token}]", bias)
    if params.beam_search is not None and params.beam_search.length_penalty not in LENGTH_PENALTIES:
        raise _out_of(LENGTH_PENALTIES, "length_penalty", params.beam_search.length_penalty)


def _out_of(allowed: Range, name: str, value: float) -> ValueError:
    return ValueError(f"{name} is {value!r}; allowed: {allowed.low:g} to {allowed.high:g}")


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """The checks of requests for one model."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def check(self, seq: Sequence) -> None:
        """Checks a sequence. ValueError, with the reason, if it could never run."""
        self._check_ids(seq.token_ids)
        given = [seq.first_token, *(fork.first_token for fork in seq.forks)]
        self._check_ids([token for token in given if token is not None])
        self._check_params(seq.params)
        self._check_prompt_logprobs(seq)
        if seq.params.beam_search is not None:
            self._check_beams(seq, seq.params.beam_search.width)

    def check_outputs(self, seq: Sequence) -> None:
        """Checks a sequence that differs from a checked one by its outputs and its seed alone. ValueError,
        with the reason, if it could never run."""
        self._check_ids(seq.output_ids)

    def _check_prompt_logprobs(self, seq: Sequence) -> None:
        """Checks the size of the prompt's log-probabilities, which are kept until the prompt is computed, and
        sent in one message. ValueError if they are too many."""
        asked = seq.params.prompt_logprobs
        if asked is not None:
            told = seq.num_prompt * (min(asked, self.vocab_size) + 1)
            if told > MAX_PROMPT_LOGPROBS:
                raise ValueError(f"{told} log-probabilities of a prompt; allowed: {MAX_PROMPT_LOGPROBS}")

    def _check_params(self, params: ResolvedSampling) -> None:
        """Checks the sampling parameters: a step with nothing to choose from would fail its whole batch.
        ValueError if they cannot work."""
        if params.structured_output is not None and not self.eos_token_ids:
            raise ValueError("structured output needs a model with an end-of-sequence token")
        _check_numbers(params)
        self._check_bad_words(params.bad_word_ids)
        if not params.shapes_logits:
            return
        biased = [token for token, _ in params.logit_bias]
        for named in (biased, params.allowed_token_ids, params.stop_token_ids, *params.bad_word_ids):
            self._check_ids(named)
        if not params.leaves_a_token(self.vocab_size, self.eos_token_ids):
            raise ValueError("allowed_token_ids, bad_words and min_tokens leave no token to be generated")

    @staticmethod
    def _check_bad_words(runs: Collection[Collection[int]]) -> None:
        if not all(runs):
            raise ValueError("a run of bad_word_ids is empty")
        if len(runs) > MAX_BAD_WORDS:
            raise ValueError(f"bad_word_ids has {len(runs)} runs; allowed: {MAX_BAD_WORDS}")
        total = sum(map(len, runs))
        if total > MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad_word_ids has {total} tokens; allowed: {MAX_BAD_WORD_TOKENS}")

    def _check_beams(self, seq: Sequence, width: int) -> None:
        params = seq.params
        if width not in BEAM_WIDTHS:
            raise ValueError(
                f"a beam search of {width} beams; allowed: {BEAM_WIDTHS.low} to {BEAM_WIDTHS.high}"
            )
        if params.shapes_logits or params.structured_output is not None:
            raise ValueError("a beam search takes the model's own distribution: nothing may change it")
        if width + len(stop_ids(params, self.eos_token_ids)) > self.vocab_size:
            raise ValueError(f"a beam search of {width} beams needs as many tokens that do not end an answer")
        if 1 + len(seq.forks) > width:
            raise ValueError(f"{1 + len(seq.forks)} answers are asked for of a beam search of {width} beams")
        given = [seq.first_token, *(fork.first_token for fork in seq.forks), *seq.output_ids]
        if any(token is not None for token in given):
            raise ValueError("outputs were given of a beam search, which tells none before its end")

    def check_candidates(self, candidates: Candidates, needed: int) -> None:
        """Checks the first candidates of a beam search that needs ``needed``. ValueError, with the reason, if
        it cannot begin with them."""
        token_ids, logprobs = candidates
        if len(token_ids) < min(needed, self.vocab_size):
            raise ValueError(f"{len(token_ids)} candidates came of {needed}")
        if len(set(token_ids)) < len(token_ids):
            raise ValueError("a candidate came twice")
        if len(logprobs) != len(token_ids) or not all(map(math.isfinite, logprobs)):
            raise ValueError("each candidate needs a finite log-probability")
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: Collection[int]) -> None:
        """Checks that token ids are in range: one bad id would fail the whole batch it is computed in.
        ValueError if one is not."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(
                f"token ids from {min(token_ids)} to {max(token_ids)}; allowed: 0 to {self.vocab_size - 1}"
            )
