"""When a sequence is over, as far as token ids tell. Stop strings belong to whoever owns the text."""

from __future__ import annotations

from collections.abc import Set

from baton.engine.sequence import FinishReason, Sequence
from baton.sampling_params import SamplingParams


def finish_reason(seq: Sequence, eos_token_ids: Set[int]) -> FinishReason | None:
    """Why ``seq`` ends with its last output, or None if it goes on. The stopping token is part of the output.

    ``ignore_eos`` concerns the model's end-of-sequence ids only: the request's own stop ids still stop it. It
    gives way to a structured output: where that is complete, nothing else can come.
    """
    params = seq.params
    token = seq.output_ids[-1]
    if token in params.stop_token_ids or _ends_it(params, token, eos_token_ids):
        return FinishReason.STOP
    if seq.num_tokens >= seq.max_len:
        return FinishReason.LENGTH
    return None


def _ends_it(params: SamplingParams, token: int, eos_token_ids: Set[int]) -> bool:
    heeded = not params.ignore_eos or params.structured_output is not None
    return heeded and token in eos_token_ids
