"""The next token of every row of logits in one launch: the likeliest, or a draw behind the filters.

What is drawn is defined by ``baton.engine.sampler``: a race of buckets, and one of the tokens of the bucket
that has won. This differs from it in three things that make no other token but by the rounding of float32:

- Weights exp(x - max), their sums in a bucket and the random numbers are float32 here. A token that weighs
  less than 2**-44 of the likeliest counts for nothing; by itself it would never win.
- The mass that top-p counts is in whole numbers of 2**-44. Sums of whole numbers are exact in any order, so
  tiles and threads may add as they like.
- Nothing is sorted. The least weight that a filter leaves is found by bisection of the bits of the weights,
  whose order is that of the numbers: count or sum what is at least as heavy as the middle, and go on in one
  half. That ends when a single token is left in between, after some fifteen passes over the row, which the
  second-level cache holds; 29 at most, when equal weights are at the edge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
WARPS = 16
BUCKET = 128
"""That of ``baton.engine.sampler``."""
LARGEST_VOCAB = 1 << 18
"""So that the weights of a row, 2**44 at most, add up to less than 2**63."""


@triton.jit
def _heavier(
    weights: tl.tensor, least: tl.tensor, vocab: tl.tensor, WITH_MASS: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """How many weights have at least the bits ``least``, and, if asked, their mass in units of 2**-44."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    for at in range(0, vocab, TILE):
        tokens = at + tl.arange(0, TILE)
        weight = tl.load(weights + tokens, mask=tokens < vocab, other=0.0)
        reaches = weight.to(tl.int32, bitcast=True) >= least
        count += reaches.to(tl.int32)
        if WITH_MASS:
            mass += tl.where(reaches, weight * 17592186044416.0, 0.0).to(tl.int64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _edge(
    weights: tl.tensor,
    low: tl.tensor,
    low_count: tl.tensor,
    limit: tl.tensor,
    vocab: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The bits of the greatest weight that at least ``limit`` tokens (or mass) reach, or lower ones that the
    same tokens reach, and how many tokens do.

    ``low`` are bits for which that holds, with what reaches them.
    """
    high = low * 0 + 0x3F800001  # just above 1.0, the likeliest token's: nothing is there
    high_count = low_count * 0
    while (high - low > 1) & (low_count - high_count > 1):
        middle = low + (high - low) // 2
        count, mass = _heavier(weights, middle, vocab, BY_MASS, TILE)
        reached = count.to(tl.int64)
        if BY_MASS:
            reached = mass
        if reached >= limit:
            low = middle
            low_count = count
        else:
            high = middle
            high_count = count
    return low, low_count


@triton.jit
def _times(seed: tl.tensor, position: tl.tensor, indices: tl.tensor) -> tl.tensor:
    """Exponentially distributed float32, as ``baton.engine.philox.exponentials`` has them: -log(1 - v), for a
    random v in (0, 1) of 32 bits, to within 1e-6 of itself, however small."""
    none = indices * 0
    words = tl.philox(
        seed,
        ((position & 0xFFFFFFFF) + none).to(tl.uint32),
        (((position >> 32) & 0xFFFFFFFF) + none).to(tl.uint32),
        (indices // 4).to(tl.uint32),
        none.to(tl.uint32),
    )
    even = tl.where(indices % 4 < 2, words[0], words[2])
    word = tl.where(indices % 2 == 0, even, tl.where(indices % 4 < 2, words[1], words[3]))
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # Where 1 - v would round to too little of v, the first terms of the series: the next is below v * 2**-26.
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    return tl.where(v < 0.0625, series, -tl.log(rest))


@triton.jit
def _race(
    weights: tl.tensor,
    least: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    vocab: tl.tensor,
    TILE: tl.constexpr,
    BUCKET: tl.constexpr,
) -> tl.tensor:
    """The token that a race of those whose weights have at least the bits ``least`` ends with."""
    best = tl.zeros([TILE // BUCKET], tl.float32)
    where = tl.zeros([TILE // BUCKET], tl.int32)
    for at in range(0, vocab, TILE):
        buckets = at // BUCKET + tl.arange(0, TILE // BUCKET)
        tokens = buckets[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
        weight = tl.load(weights + tokens, mask=tokens < vocab, other=0.0)
        kept = weight.to(tl.int32, bitcast=True) >= least
        speed = tl.sum(tl.where(kept, weight, 0.0), 1) / _times(seed, position, BUCKET + buckets.to(tl.int64))
        where = tl.where(speed > best, buckets, where)
        best = tl.maximum(speed, best)
    bucket = tl.min(tl.where(best == tl.max(best, 0), where, vocab), 0)

    runners = tl.arange(0, BUCKET)
    tokens = bucket * BUCKET + runners
    weight = tl.load(weights + tokens, mask=tokens < vocab, other=0.0)
    kept = weight.to(tl.int32, bitcast=True) >= least
    speed = tl.where(kept, weight, 0.0) / _times(seed, position, runners.to(tl.int64))
    return tl.min(tl.where(speed == tl.max(speed, 0), tokens, vocab), 0)


@triton.jit
def _draw(
    logits: tl.tensor,
    settings: tl.tensor,
    seeds: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    TILE: tl.constexpr,
    BUCKET: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    weights = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(settings + row).to(tl.float32)

    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.zeros([TILE], tl.int32)
    for at in range(0, vocab, TILE):
        tokens = at + tl.arange(0, TILE)
        value = tl.load(weights + tokens, mask=tokens < vocab, other=float("-inf"))
        where = tl.where(value > best, tokens, where)
        best = tl.maximum(value, best)
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, where, vocab - 1), 0)

    # A row without any token to choose has -inf for its peak, and -inf - -inf is NaN.
    if (temperature > 0.0) & (peak > float("-inf")):
        # The logits become weights, in place: every further pass would need them.
        # 0x29800000 is 2**-44: what is lighter counts for nothing.
        low = tl.full([], 0x29800000, tl.int32)
        peak = tl.div_rn(peak, temperature)
        count = tl.zeros([TILE], tl.int32)
        masses = tl.zeros([TILE], tl.int64)
        for at in range(0, vocab, TILE):
            tokens = at + tl.arange(0, TILE)
            value = tl.load(weights + tokens, mask=tokens < vocab, other=float("-inf"))
            weight = tl.exp(tl.div_rn(value, temperature) - peak)
            tl.store(weights + tokens, weight, mask=tokens < vocab)
            count += (weight.to(tl.int32, bitcast=True) >= low).to(tl.int32)
            masses += (weight * 17592186044416.0).to(tl.int64)
        tl.debug_barrier()  # other threads read what this one wrote
        heavy = tl.sum(count, 0)
        mass = tl.sum(masses, 0)

        top_k = tl.load(settings + rows + row).to(tl.int32)
        top_p = tl.load(settings + 2 * rows + row)
        min_p = tl.load(settings + 3 * rows + row).to(tl.float32)
        if (top_k > 0) & (top_k < heavy):
            low, heavy = _edge(weights, low, heavy, top_k.to(tl.int64), vocab, False, TILE)
            if top_p < 1.0:
                heavy, mass = _heavier(weights, low, vocab, True, TILE)
        if top_p < 1.0:
            # Of tokens that share the k-th place, the mass has only as many as make k.
            shared = (low.to(tl.float32, bitcast=True) * 17592186044416.0).to(tl.int64)
            surplus = tl.where(top_k > 0, tl.maximum(heavy - top_k, 0), 0)
            share = tl.ceil((mass - surplus * shared).to(tl.float64) * top_p).to(tl.int64)
            low, heavy = _edge(weights, low, heavy, tl.maximum(share, 1), vocab, True, TILE)
        low = tl.maximum(low, min_p.to(tl.int32, bitcast=True))
        seed = tl.load(seeds + row)
        token = _race(weights, low, seed, tl.load(seeds + rows + row), vocab, TILE, BUCKET)
    tl.store(out + row, tl.minimum(token, vocab - 1).to(tl.int64))


def draw(logits: Tensor, settings: Tensor, seeds: Tensor) -> Tensor:
    """The next token of each row of ``logits`` [R, V] float32, which this changes: [R] int64, on the device.

    ``settings`` [4, R] float64: temperature (0: the likeliest token), top-k (0: off), top-p, min-p.
    ``seeds`` [2, R] int64: each row's seed, and the index of the token among its outputs.
    """
    rows, vocab = logits.shape
    if vocab > LARGEST_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens: at most {LARGEST_VOCAB}")
    if logits.stride(1) != 1:
        raise ValueError(f"a row of logits must be contiguous, not strided by {logits.stride(1)}")
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _draw[(rows,)](
            logits,
            settings,
            seeds,
            out,
            logits.stride(0),
            rows,
            vocab,
            TILE=TILE,
            BUCKET=BUCKET,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return out
