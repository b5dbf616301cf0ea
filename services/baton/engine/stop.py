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
    if stops(seq, eos_token_ids):
        return FinishReason.STOP
    if seq.num_tokens >= seq.max_len:
        return FinishReason.LENGTH
    return None


def stops(seq: Sequence, eos_token_ids: Set[int]) -> bool:
    """Whether the last output is one that ends ``seq``."""
    params, token = seq.params, seq.output_ids[-1]
    return token in params.stop_token_ids or (_heeds_eos(params) and token in eos_token_ids)


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a sequence with these parameters."""
    return params.stop_token_ids | eos_token_ids if _heeds_eos(params) else params.stop_token_ids


def _heeds_eos(params: SamplingParams) -> bool:
    return not params.ignore_eos or params.structured_output is not None
