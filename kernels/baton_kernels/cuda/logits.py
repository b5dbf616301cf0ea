"""Changes to logits before a token is chosen: masks of the vocabulary, and rules about single tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound

TOKENS = 4096
"""Tokens of a mask that a program processes."""
ENTRIES = 128
"""Entries of a row's rules that a program processes at a time."""


@bound
@triton.jit(
    do_not_specialize=["row_stride", "num_words"],
    do_not_specialize_on_alignment=["logits", "rows", "words"],
)
def _bar_tokens(
    logits: tl.tensor,
    rows: tl.tensor,
    words: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    num_words: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    mask = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    real = tokens < vocab
    word = tl.load(words + mask * num_words + tokens // 32, mask=real, other=0)
    barred = ((word >> (tokens % 32)) & 1) == 0
    row = logits + tl.load(rows + mask) * row_stride
    tl.store(row + tokens, tl.full([TOKENS], float("-inf"), tl.float32), mask=real & barred)


def bar_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See ``baton_kernels.rows``."""
    vocab = logits.shape[1]
    if logits.stride(1) != 1 or not words.is_contiguous():
        raise ValueError(f"rows must be contiguous, not strided by {logits.stride(1)}, {words.stride()}")
    if len(rows):
        _bar_tokens[(len(rows), triton.cdiv(vocab, TOKENS))](
            logits,
            rows,
            words,
            logits.stride(0),
            vocab,
            words.shape[1],
            TOKENS=TOKENS,
            num_warps=4,
            enable_fp_fusion=True,
        )


@bound
@triton.jit(
    do_not_specialize=["row_stride", "count"],
    do_not_specialize_on_alignment=["logits", "rows", "starts", "penalties", "ids", "values"],
)
def _adjust(
    logits: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    penalties: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    rule = tl.program_id(0)
    row = logits + tl.load(rows + rule).to(tl.int64) * row_stride
    lanes = tl.arange(0, ENTRIES)
    biased = tl.load(starts + 3 * rule + 1)
    seen = tl.load(starts + 3 * rule + 2)
    stop = tl.load(starts + 3 * rule + 3)
    for at in range(tl.load(starts + 3 * rule), biased, ENTRIES):
        entry = at + lanes
        token = tl.load(ids + entry, mask=entry < biased, other=0)
        tl.store(row + token, tl.full([ENTRIES], float("-inf"), tl.float32), mask=entry < biased)
    tl.debug_barrier()  # a token may be in several lists, and other threads continue with it
    for at in range(biased, seen, ENTRIES):
        entry = at + lanes
        token = tl.load(ids + entry, mask=entry < seen, other=0)
        logit = tl.load(row + token, mask=entry < seen, other=0.0)
        bias = tl.load(values + entry, mask=entry < seen, other=0.0)
        tl.store(row + token, logit + bias, mask=entry < seen)
    tl.debug_barrier()
    repetition = tl.load(penalties + rule)
    frequency = tl.load(penalties + count + rule)
    presence = tl.load(penalties + 2 * count + rule)
    for at in range(seen, stop, ENTRIES):
        entry = at + lanes
        token = tl.load(ids + entry, mask=entry < stop, other=0)
        logit = tl.load(row + token, mask=entry < stop, other=0.0)
        outputs = tl.load(values + entry, mask=entry < stop, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit -= frequency * outputs
        logit -= tl.where(outputs > 0, presence, 0.0)
        tl.store(row + token, logit, mask=entry < stop)


def adjust(
    logits: Tensor, rows: Tensor, starts: Tensor, penalties: Tensor, ids: Tensor, values: Tensor
) -> None:
    """Applies the rules about single tokens to some rows of ``logits`` [R, V] float32, in place.

    ``rows`` [r] int32. Each row has three lists of distinct tokens, the lists of all rows behind each other
    in ``ids`` [n] int32: tokens that are barred, tokens that get ``values`` [n] float32 added, and tokens to
    penalize, whose ``values`` are how often each was output. ``starts`` [3 r + 1] int32 is where each list
    begins. ``penalties`` [3, r] float32: repetition, frequency, presence.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"a row of logits must be contiguous, not strided by {logits.stride(1)}")
    if len(rows):
        # Each product is rounded by itself, as on a CPU.
        _adjust[(len(rows),)](
            logits,
            rows,
            starts,
            penalties,
            ids,
            values,
            logits.stride(0),
            len(rows),
            ENTRIES=ENTRIES,
            num_warps=4,
            enable_fp_fusion=False,
        )
