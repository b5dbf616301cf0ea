"""The next token of every row of logits in one launch: the likeliest, or a draw behind the filters.

``baton.engine.sampling.sampler`` defines the draw: a race of buckets, and one of the tokens of the bucket
that has won. This kernel differs from it in three things that change a token only by the rounding of float32:

- Weights exp(x - max), their sums in a bucket and the random numbers are float32 here. A token that weighs
  less than 2**-44 of the likeliest counts for nothing; by itself it would never win.
- The mass that top-p counts is in whole numbers of 2**-44. Sums of whole numbers are exact in any order, so
  tiles and threads may add as they like.
- Nothing is sorted. The least weight that a filter leaves is found by bisection of the bits of the weights,
  whose order is that of the numbers: count or sum the weights of at least the middle, and go on in one half.
  That ends when a single token is left in between.

A row is read three times: for the likeliest token, for the weights, for the race. The second pass keeps the
four heaviest tokens of each of 2048 columns in registers. What is at least as heavy as the heaviest of the
fourths, and a bit, is all there, so the bisection counts there: some hundred tokens of a real distribution,
whatever top-k or top-p leaves of it. Only where a filter leaves more does it go over the row, some fifteen
times; 28 at most, when equal weights are at the edge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound

TILE = 8192
COLUMNS = 2048
"""The columns whose heaviest tokens are kept in registers: token t is in column t % COLUMNS."""
WARPS = 16
BUCKET = 128
"""The bucket size of ``baton.engine.sampling.sampler``."""
LARGEST_VOCAB = 1 << 18
"""The largest vocabulary: the weights of a row, 2**44 at most each, add up to less than 2**63."""


@triton.jit
def _heavier(
    weights: tl.tensor, least: tl.tensor, vocab: tl.tensor, WITH_MASS: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The count of weights with at least the bits ``least`` and, if asked, their mass in units of 2**-44."""
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
def _heavier_of_heaviest(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    fourth: tl.tensor,
    least: tl.tensor,
    WITH_MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Does what ``_heavier`` does, over each column's heaviest tokens alone."""
    count = (first.to(tl.int32, bitcast=True) >= least).to(tl.int32)
    count += (second.to(tl.int32, bitcast=True) >= least).to(tl.int32)
    count += (third.to(tl.int32, bitcast=True) >= least).to(tl.int32)
    count += (fourth.to(tl.int32, bitcast=True) >= least).to(tl.int32)
    mass = tl.zeros(first.shape, tl.int64)
    if WITH_MASS:
        mass += _units(first, least)
        mass += _units(second, least)
        mass += _units(third, least)
        mass += _units(fourth, least)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _heaviest(
    first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor, weight: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The four heaviest of five, in each column; the first four descend."""
    after_first = tl.minimum(first, weight)
    after_second = tl.minimum(second, after_first)
    after_third = tl.minimum(third, after_second)
    return (
        tl.maximum(first, weight),
        tl.maximum(second, after_first),
        tl.maximum(third, after_second),
        tl.maximum(fourth, after_third),
    )


@triton.jit
def _units(weight: tl.tensor, least: tl.tensor) -> tl.tensor:
    """The weights in units of 2**-44; 0 for those below the bits ``least``."""
    reaches = weight.to(tl.int32, bitcast=True) >= least
    return tl.where(reaches, weight * 17592186044416.0, 0.0).to(tl.int64)


@triton.jit
def _edge(
    weights: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    fourth: tl.tensor,
    known: tl.tensor,
    low: tl.tensor,
    low_count: tl.tensor,
    limit: tl.tensor,
    vocab: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The bits of the greatest weight that at least ``limit`` tokens (or mass) reach, or lower bits that the
    same tokens reach, and how many tokens do.

    ``low`` are bits that at least ``limit`` reach, and ``low_count`` the tokens that reach them. All tokens
    with at least the bits ``known`` are among ``first`` to ``fourth``.
    """
    high = low * 0 + 0x3F800001  # just above 1.0, the likeliest token's weight: no token is there
    high_count = low_count * 0
    middle = tl.where(low >= known, low + (high - low) // 2, known)
    among = high > 0
    while (high - low > 1) & (low_count - high_count > 1):
        if among:
            count, mass = _heavier_of_heaviest(first, second, third, fourth, middle, BY_MASS)
        else:
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
        among = low >= known
        middle = low + (high - low) // 2
    return low, low_count


@triton.jit
def _times(seed: tl.tensor, position: tl.tensor, indices: tl.tensor) -> tl.tensor:
    """The exponentially distributed numbers of ``baton.engine.sampling.philox.exponentials`` in float32:
    -log(1 - v), for a random v in (0, 1) of 32 bits, with a relative error of at most 1e-6, however small."""
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
    """The winner of a race of the tokens whose weights have at least the bits ``least``."""
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


@bound
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["logits", "settings", "seeds", "out"])
def _draw(
    logits: tl.tensor,
    settings: tl.tensor,
    seeds: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BUCKET: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    weights = logits + row.to(tl.int64) * row_stride
    if ALIGNED:
        weights = tl.multiple_of(weights, 16)
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
        top_k = tl.load(settings + rows + row).to(tl.int32)
        top_p = tl.load(settings + 2 * rows + row)
        min_p = tl.load(settings + 3 * rows + row).to(tl.float32)
        filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)
        # The logits become weights, in place: every further pass would need them. 0x29800000 is 2**-44:
        # lighter weights count for nothing.
        low = tl.full([], 0x29800000, tl.int32)
        peak = tl.div_rn(peak, temperature)
        count = tl.zeros([2 * COLUMNS], tl.int32)
        masses = tl.zeros([2 * COLUMNS], tl.int64)
        first = tl.zeros([COLUMNS], tl.float32)
        second = tl.zeros([COLUMNS], tl.float32)
        third = tl.zeros([COLUMNS], tl.float32)
        fourth = tl.zeros([COLUMNS], tl.float32)
        for at in range(0, vocab, 2 * COLUMNS):
            tokens = at + tl.arange(0, 2 * COLUMNS)
            value = tl.load(weights + tokens, mask=tokens < vocab, other=float("-inf"))
            weight = tl.exp(tl.div_rn(value, temperature) - peak)
            tl.store(weights + tokens, weight, mask=tokens < vocab)
            count += (weight.to(tl.int32, bitcast=True) >= low).to(tl.int32)
            masses += (weight * 17592186044416.0).to(tl.int64)
            if filtered:
                even, odd = tl.split(tl.reshape(weight, [COLUMNS, 2]))
                first, second, third, fourth = _heaviest(first, second, third, fourth, even)
                first, second, third, fourth = _heaviest(first, second, third, fourth, odd)
        tl.debug_barrier()  # other threads read what this one wrote
        heavy = tl.sum(count, 0)
        mass = tl.sum(masses, 0)
        # A token that is none of its column's heaviest weighs no more than the last of these.
        known = tl.max(fourth.to(tl.int32, bitcast=True), 0) + 1

        if (top_k > 0) & (top_k < heavy):
            low, heavy = _edge(
                weights, first, second, third, fourth, known, low, heavy, top_k.to(tl.int64), vocab, False,
                2 * COLUMNS,
            )  # fmt: skip
            if top_p < 1.0:
                if low >= known:
                    heavy, mass = _heavier_of_heaviest(first, second, third, fourth, low, True)
                else:
                    heavy, mass = _heavier(weights, low, vocab, True, 2 * COLUMNS)
        if top_p < 1.0:
            # The mass counts only as many of the tokens that share the k-th place as make k.
            shared = (low.to(tl.float32, bitcast=True) * 17592186044416.0).to(tl.int64)
            surplus = tl.where(top_k > 0, tl.maximum(heavy - top_k, 0), 0)
            share = tl.ceil((mass - surplus * shared).to(tl.float64) * top_p).to(tl.int64)
            low, heavy = _edge(
                weights, first, second, third, fourth, known, low, heavy, tl.maximum(share, 1), vocab, True,
                2 * COLUMNS,
            )  # fmt: skip
        low = tl.maximum(low, min_p.to(tl.int32, bitcast=True))
        seed = tl.load(seeds + row)
        token = _race(weights, low, seed, tl.load(seeds + rows + row), vocab, TILE // 2, BUCKET)
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
    if logits.stride(0) % 4 == 0 and logits.data_ptr() % 16:
        raise ValueError("rows of logits must begin at a multiple of 16 bytes, as their stride is one")
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
            COLUMNS=COLUMNS,
            BUCKET=BUCKET,
            ALIGNED=logits.stride(0) % 4 == 0,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return out
