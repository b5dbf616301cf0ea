"""Causal attention of one chunk whose keys and values are expanded, each head's own.

A program takes a run of queries of one head. Keys that all of them see are processed without a mask, only
those on the diagonal with one. Keys and values have different sizes, and a key's may be no power of two: its
scores are the sum of two products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.latent_shapes import LatentShape, key_parts, padded
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import base_two
from baton_kernels.cuda.tiles import add_tile


@triton.jit
def _pass(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    query_rest: tl.tensor,
    position: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    scale: tl.tensor,
    k_token: tl.tensor,
    v_token: tl.tensor,
    FIRST: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go through tiles begin..end-1, with a mask or without."""
    dims = tl.arange(0, DIMS)
    rest = FIRST + tl.arange(0, max(16, REST))
    values = tl.arange(0, VALUES)
    for tile in range(begin, end):
        tokens = tile * TILE + tl.arange(0, TILE)
        there = (tokens < context)[:, None]
        places = tokens.to(tl.int64)[:, None]
        keys = k + places * k_token
        wanted = v + places * v_token + values[None, :]
        if MASKED:
            key = tl.load(keys + dims[None, :], mask=there & (dims < FIRST)[None, :], other=0.0)
            value = tl.load(wanted, mask=there & (values < VALUE)[None, :], other=0.0)
        else:
            key = tl.load(keys + dims[None, :], mask=(dims < FIRST)[None, :], other=0.0)
            value = tl.load(wanted, mask=(values < VALUE)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if REST > 0:
            behind = (rest < KEY)[None, :]
            if MASKED:
                behind = behind & there
            key_rest = tl.load(keys + rest[None, :], mask=behind, other=0.0)
            scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision=PRECISION)
        scores *= scale
        if MASKED:
            scores = tl.where(tokens[None, :] <= position[:, None], scores, float("-inf"))
        acc, peak, total = add_tile(acc, peak, total, scores, value, MASKED, PRECISION)
    return acc, peak, total


@bound
@triton.jit(do_not_specialize=["length", "context"])
def _expanded(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    context: tl.tensor,
    scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    FIRST: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    # The last queries see most keys, so they begin first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1).to(tl.int64)
    numbers = first + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    rest = FIRST + tl.arange(0, max(16, REST))
    values = tl.arange(0, VALUES)
    own = numbers < length
    row = numbers.to(tl.int64)
    wide = q + (row * q_token + head * q_head)[:, None]
    query = tl.load(wide + dims[None, :], mask=own[:, None] & (dims < FIRST)[None, :], other=0.0)
    query_rest = tl.load(wide + rest[None, :], mask=own[:, None] & (rest < KEY)[None, :], other=0.0)
    position = context - length + numbers
    end = tl.cdiv(tl.minimum(context - length + first + ROWS, context), TILE)
    seen_by_all = (context - length + first + 1) // TILE
    k += head * k_head
    v += head * v_head
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, peak, total = _pass(
        acc, peak, total, query, query_rest, position, k, v, 0, seen_by_all, context, scale, k_token, v_token,
        FIRST, KEY, VALUE, TILE, DIMS, REST, VALUES, False, PRECISION,
    )  # fmt: skip
    acc, peak, total = _pass(
        acc, peak, total, query, query_rest, position, k, v, seen_by_all, end, context, scale, k_token,
        v_token, FIRST, KEY, VALUE, TILE, DIMS, REST, VALUES, True, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + ((row * tl.num_programs(1) + head) * VALUE)[:, None] + values[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=own[:, None] & (values < VALUE)[None, :])


def attend_expanded(q: Tensor, k: Tensor, v: Tensor, out: Tensor, shape: LatentShape, scale: float) -> None:
    """See ``LatentPlan.attend_expanded``. ``out`` is contiguous."""
    (length, heads, key_dim), value_dim = q.shape, v.shape[2]
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the numbers of a query, key or value must lie behind each other")
    split = key_parts(key_dim)
    tiling = shape.expanded(split, value_dim)
    dims, rest = split.padded
    _expanded[(triton.cdiv(length, tiling.rows), heads)](
        q,
        k,
        v,
        out,
        length,
        len(k),
        base_two(scale, None)[0],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        FIRST=split.first,
        KEY=key_dim,
        VALUE=value_dim,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        DIMS=dims,
        REST=rest,
        VALUES=padded(value_dim),
        PRECISION=shape.precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=255,  # as in decode
        enable_fp_fusion=True,
    )
