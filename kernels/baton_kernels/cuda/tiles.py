"""The shared parts of the attention kernels: a tile of keys and values out of the pool, and the softmax over
tiles.

The softmax is the online one of FlashAttention (https://arxiv.org/abs/2205.14135), to the base 2: scores are
multiplied by log2(e) with the scale, as the hardware has an instruction for 2**x but none for e**x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels.cuda.kv_codes import numbers

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    head: tl.tensor,
    table: tl.tensor,
    tile: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """K and V of tokens ``tile * TILE ...`` of one sequence, both [TILE, DIMS], as the pool has them.

    ``head`` points at the K of this layer and KV head in block 0; V lies one block's K behind it. If MASKED,
    only tokens low..high-1 are read and the others are 0: their slots may hold NaN.
    """
    tokens = tile * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, DIMS)
    if BLOCK_SIZE % TILE == 0:  # one block holds the whole tile
        blocks = tl.load(table + tile * TILE // BLOCK_SIZE)
    elif MASKED:
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=(tokens >= low) & (tokens < high), other=0)
    else:
        blocks = tl.load(table + tokens // BLOCK_SIZE)
    slots = head + blocks * block_stride + tokens % BLOCK_SIZE * HEAD_DIM
    keys = slots[:, None] + dims[None, :]
    values = keys + BLOCK_SIZE * HEAD_DIM
    if MASKED:
        seen = ((tokens >= low) & (tokens < high))[:, None] & (dims < HEAD_DIM)[None, :]
        return tl.load(keys, mask=seen, other=0.0), tl.load(values, mask=seen, other=0.0)
    if DIMS != HEAD_DIM:
        real = (dims < HEAD_DIM)[None, :]
        return tl.load(keys, mask=real, other=0.0), tl.load(values, mask=real, other=0.0)
    return tl.load(keys), tl.load(values)


@triton.jit
def window_start(context: tl.tensor, window: tl.tensor, CHUNKED: tl.constexpr) -> tl.tensor:
    """The first token that a query sees whose ``context`` is the tokens up to it, itself included; below 0 if
    a sliding window is wider than that. ``window``: the size of the window, or of a run if CHUNKED."""
    if CHUNKED:
        return (context - 1) // window * window
    return context - window


@triton.jit
def accumulate(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds one tile's share of softmax(scores) v. Codes of ``k`` and ``v`` become numbers of q's type.

    ``acc`` [ROWS, DIMS] is the sum of weights times values so far, ``total`` [ROWS] the sum of the weights,
    both over 2**``peak``. ``scale`` and ``softcap`` carry log2(e) (see ``base_two``). ``seen`` is [ROWS,
    TILE].
    """
    k = numbers(k, q.dtype)
    v = numbers(v, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x), which neither end overflows. With x = scores / softcap the two
        # factors log2(e) cancel out, and the exponent needs one of its own.
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.885390081777927 / softcap))))
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    acc, peak, total = add_tile(acc, peak, total, scores, v, MASKED, PRECISION)
    return acc, peak, total


@triton.jit
def add_tile(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    scores: tl.tensor,
    v: tl.tensor,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds the share of one tile whose ``scores`` [ROWS, TILE] are known, if MASKED -inf where nothing is
    seen. The sums are those of ``accumulate``."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has -inf for its peak, and -inf - -inf is NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(peak - base)
    acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision=PRECISION)
    return acc, higher, total * kept + tl.sum(weights, 1)


@triton.jit
def join(
    parts: tl.tensor,
    totals: tl.tensor,
    first: tl.tensor,
    base: tl.tensor,
    step: tl.tensor,
    count: tl.tensor,
    own: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """The means of ``count`` parts, [ROWS, DIMS], weighted by their totals (logarithms to the base 2).

    Part 0 begins at row ``first`` of ``parts`` and ``totals``, part i at ``base + i * step``; rows that are
    not ``own`` are 0. The parts are added in order: the sum does not depend on who arrived when. Other
    programs have written them just before, so nothing is read through the first-level cache.
    """
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    real = own[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.range(0, count, num_stages=STAGES):
        place = tl.where(part == 0, first, base + part * step) + rows
        found = tl.load(totals + place, mask=own, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            parts + place[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(peak, found)
        against = tl.where(higher == float("-inf"), 0.0, higher)
        added = tl.exp2(found - against)
        kept = tl.exp2(peak - against)
        acc = acc * kept[:, None] + values * added[:, None]
        total = total * kept + added
        peak = higher
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def last_at_most(starts: tl.tensor, count: tl.tensor, value: tl.tensor, step: tl.constexpr) -> tl.tensor:
    """The last i < count with starts[i] <= value, or with a step, starts[i] // step + i <= value.

    ``starts`` ascends from 0.
    """
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(starts + middle)
        if step > 0:
            start = start // step + middle
        if start <= value:
            low = middle
        else:
            high = middle
    return low
