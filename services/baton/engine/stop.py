"""The end of a sequence, as far as token ids tell. Stop strings are matched where the text is made."""

from __future__ import annotations

from collections.abc import Set

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sequence import FinishReason, Sequence


def finish_reason(seq: Sequence, eos_token_ids: Set[int]) -> FinishReason | None:
    """Why ``seq`` ends with its last output, or None if it goes on. The stopping token is part of the output.

    ``ignore_eos`` concerns the model's end-of-sequence ids only: the request's own stop ids still stop it. A
    structured output overrides it: where that is complete, nothing else can follow.
    """
    if stops(seq, eos_token_ids):
        return FinishReason.STOP
    if len(seq.token_ids) >= seq.max_len:
        return FinishReason.LENGTH
    return None


def stops(seq: Sequence, eos_token_ids: Set[int]) -> bool:
    """Whether the last output is one that ends ``seq``."""
    params, token = seq.params, seq.output_ids[-1]
    return token in params.stop_token_ids or (token in eos_token_ids and _heeds_eos(params))


def stop_ids(params: ResolvedSampling, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a sequence with these parameters."""
    return params.stop_token_ids | eos_token_ids if _heeds_eos(params) else params.stop_token_ids


def _heeds_eos(params: ResolvedSampling) -> bool:
    return not params.ignore_eos or params.structured_output is not None
