"""When a sequence is over, as far as token ids tell. Stop strings belong to whoever owns the text."""

from __future__ import annotations

from collections.abc import Set

from baton.engine.sequence import FinishReason, Sequence


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
    heeds_eos = not params.ignore_eos or params.structured_output is not None
    return token in params.stop_token_ids or (heeds_eos and token in eos_token_ids)
