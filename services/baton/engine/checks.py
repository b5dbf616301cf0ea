"""What a request must be to run on a model: whoever sent it, a worker trusts nobody."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from baton.engine.beams import Candidates
from baton.engine.sequence import Sequence
from baton.engine.stop import stop_ids
from baton.request.limits import (
    MAX_BEAMS,
    MAX_BIAS,
    MAX_LENGTH_PENALTY,
    MAX_PENALTY,
    MAX_PROMPT_LOGPROBS,
    MAX_REPETITION,
    MAX_TEMPERATURE,
)
from baton.sampling_params import SamplingParams

_MOST = 2**32 - 1
"""Of what more of does no harm: as much as the wire can say."""


def _bounded(params: SamplingParams) -> Iterator[tuple[str, float, float, float]]:
    """Each number of the parameters by its name, with the least and the most that it may be."""
    yield "temperature", params.temperature, 0, MAX_TEMPERATURE
    yield "top_k", params.top_k, 0, _MOST
    yield "top_p", params.top_p, 0, 1
    yield "min_p", params.min_p, 0, 1
    # On the wire it is rounded to float32.
    yield "repetition_penalty", params.repetition_penalty, 0.999 / MAX_REPETITION, MAX_REPETITION
    yield "presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY
    yield "frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY
    yield "min_tokens", params.min_tokens, 0, _MOST
    yield "logprobs", params.logprobs or 0, 0, _MOST
    yield "prompt_logprobs", params.prompt_logprobs or 0, 0, _MOST
    for token, bias in params.logit_bias:
        yield f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS
    if params.beam_search is not None:
        penalty = params.beam_search.length_penalty
        yield "length_penalty", penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY


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
        self._check_prompt_logprobs(seq)
        if seq.params.beam_search is not None:
            self._check_beams(seq, seq.params.beam_search.width)

    def _check_prompt_logprobs(self, seq: Sequence) -> None:
        """They are kept until the prompt is computed, and told in one message."""
        asked = seq.params.prompt_logprobs
        if asked is not None:
            told = seq.num_prompt * (min(asked, self.vocab_size) + 1)
            if told > MAX_PROMPT_LOGPROBS:
                raise ValueError(f"{told} log-probabilities of a prompt; allowed: {MAX_PROMPT_LOGPROBS}")

    def _check_params(self, params: SamplingParams) -> None:
        """Like a bad id, a step with nothing to choose from would fail others too."""
        if params.structured_output is not None and not self.eos_token_ids:
            raise ValueError("structured output needs a model with an end-of-sequence token")
        for name, value, least, most in _bounded(params):
            if not least <= value <= most:  # nor is it a number if it is NaN
                raise ValueError(f"{name} is {value!r}; allowed: {least:g} to {most:g}")
        if not all(params.bad_word_ids):
            raise ValueError("a run of bad_word_ids is empty")
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

    def check_candidates(self, candidates: Candidates, needed: int) -> None:
        """ValueError, saying why, if a beam search of so many candidates cannot begin with these."""
        token_ids, logprobs = candidates
        if len(token_ids) < min(needed, self.vocab_size):
            raise ValueError(f"{len(token_ids)} candidates came of {needed}")
        if len(set(token_ids)) < len(token_ids):
            raise ValueError("a candidate came twice")
        if len(logprobs) != len(token_ids) or not all(map(math.isfinite, logprobs)):
            raise ValueError("each candidate needs a finite log-probability")
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: Collection[int]) -> None:
        """One bad id would fail the whole batch it is computed in."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(
                f"token ids from {min(token_ids)} to {max(token_ids)}; allowed: 0 to {self.vocab_size - 1}"
            )
