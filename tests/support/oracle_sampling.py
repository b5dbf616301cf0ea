"""What sampling parameters mean by transformers: its logits processors, and its log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from baton.core.logprobs import Logprobs
from baton.core.sampling_params import ResolvedSampling
from tests.support.tiny_models import EOS, IM_END, oracle_logits

CLOSE = 1e-4
"""How far log-probabilities may be from transformers'."""


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalty by the formula in OpenAI's documentation; transformers has neither."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self.num_prompt, self.presence, self.frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt :], minlength=scores.shape[-1])
        return scores - counts * self.frequency - (counts > 0) * self.presence


def processors(params: ResolvedSampling, num_prompt: int) -> list[LogitsProcessor]:
    """The processors for ``params`` in the order that transformers' ``generate`` has."""
    found: list[LogitsProcessor] = []
    ends = sorted({EOS, IM_END} | params.stop_token_ids)
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias}
        found.append(SequenceBiasLogitsProcessor(bias))  # type: ignore[arg-type]
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_word_ids:
        runs = [list(run) for run in params.bad_word_ids]
        found.append(NoBadWordsLogitsProcessor(runs))
    if params.min_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, ends))
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        found.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    if params.presence_penalty or params.frequency_penalty:
        found.append(OutputPenalties(num_prompt, params.presence_penalty, params.frequency_penalty))
    return found


def assert_logprobs(
    path: Path, token_ids: Sequence[int], start: int, told: Logprobs, num_top: int, *, ranks: bool = True
) -> None:
    """``told`` is what transformers says of ``token_ids[start:]``, each given all tokens before it."""
    count = len(token_ids) - start
    assert (len(told), told.num_top if count else num_top) == (count, num_top)
    if not count:
        return
    expected = oracle_logits(path, token_ids)[start - 1 : -1].double().log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(token_ids[start:])[:, None])
    assert_close(told.chosen, chosen[:, 0])
    assert not ranks or list(told.ranks) == ((expected > chosen).sum(-1) + 1).tolist()
    assert_close(told.top, expected.topk(num_top).values.flatten())
    ids = torch.tensor(told.top_ids, dtype=torch.int64).view(count, num_top)
    assert_close(told.top, expected.gather(1, ids).flatten())
    assert all(len(set(row)) == num_top for row in ids.tolist())


def rank_margin(path: Path, token_ids: Sequence[int]) -> float:
    """How near the log-probability of another token comes to that of any of these, each given those before
    it. Where that is as little as float32 sums of another order differ, ranks hang on the order."""
    if len(token_ids) < 2:
        return math.inf
    told = oracle_logits(path, token_ids)[:-1].double().log_softmax(-1)
    ids = torch.tensor(token_ids[1:])[:, None]
    apart = (told - told.gather(1, ids)).abs().scatter(1, ids, math.inf)
    return float(apart.min())


def assert_close(told: Sequence[float], expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(told, dtype=torch.float64), expected.double(), rtol=0, atol=CLOSE)
