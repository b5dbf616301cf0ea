"""The path from the fused projection to the pool in one launch: norm of queries and keys, rotation, KV write.

A program takes a few heads of one token. Every head is loaded as two halves, since a dimension is rotated
with the one half a head away.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.kv_codes import codes
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.kv_fp8 import UNSCALED, KVScales
from baton_kernels.paged import PagedBatch
from baton_kernels.rotary import HeadNorm

HEADS = 8
"""The number of heads of a program."""


@bound
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["blocks", "offsets"])
def _rotate_and_store(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    out: tl.tensor,
    pool: tl.tensor,
    blocks: tl.tensor,
    offsets: tl.tensor,
    layer: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    k_factor: tl.tensor,
    v_factor: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    pool_block: tl.tensor,
    pool_head: tl.tensor,
    pool_layer: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    inner = dims < HALF
    real = (head < QUERY_HEADS + 2 * KV_HEADS) & inner
    is_query = head < QUERY_HEADS
    is_value = head >= QUERY_HEADS + KV_HEADS

    place = qkv + token * token_stride + head * head_stride + dims
    first = tl.load(place, mask=real, other=0.0)
    second = tl.load(place + HALF, mask=real, other=0.0)
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)[:, None]
        of_query = tl.load(q_weight + dims, mask=inner, other=0.0).to(tl.float32)
        of_key = tl.load(k_weight + dims, mask=inner, other=0.0).to(tl.float32)
        x = x * scale * (tl.where(is_query, of_query, of_key) + offset)
        of_query = tl.load(q_weight + HALF + dims, mask=inner, other=0.0).to(tl.float32)
        of_key = tl.load(k_weight + HALF + dims, mask=inner, other=0.0).to(tl.float32)
        y = y * scale * (tl.where(is_query, of_query, of_key) + offset)
    angle = token * HEAD_DIM + dims
    cos_x = tl.load(cos + angle, mask=inner, other=0.0)
    sin_x = tl.load(sin + angle, mask=inner, other=0.0)
    cos_y = tl.load(cos + HALF + angle, mask=inner, other=0.0)
    sin_y = tl.load(sin + HALF + angle, mask=inner, other=0.0)
    # sin_x carries the minus: see baton_kernels.rotary.rotate.
    turned = (x * cos_x + y * sin_x).to(first.dtype)
    turned_second = (y * cos_y + x * sin_y).to(first.dtype)

    query = out + (token * QUERY_HEADS + head) * HEAD_DIM + dims
    tl.store(query, turned, mask=real & is_query)
    tl.store(query + HALF, turned_second, mask=real & is_query)
    kv_head = tl.where(is_value, head - QUERY_HEADS - KV_HEADS, head - QUERY_HEADS)
    slot = tl.load(blocks + token) * pool_block + layer.to(tl.int64) * pool_layer
    slot += tl.load(offsets + token) * HEAD_DIM
    slot = pool + slot + kv_head * pool_head + tl.where(is_value, BLOCK_SIZE * HEAD_DIM, 0) + dims
    stored = real & (head >= QUERY_HEADS)
    factor = tl.where(is_value, v_factor, k_factor)
    kept = codes(tl.where(is_value, first, turned), factor, pool.dtype.element_ty)
    kept_second = codes(tl.where(is_value, second, turned_second), factor, pool.dtype.element_ty)
    tl.store(slot, kept, mask=stored)
    tl.store(slot + HALF, kept_second, mask=stored)


def rotate_and_store(
    pool: Tensor,
    layer: int,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: HeadNorm | None,
    batch: PagedBatch,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """See ``baton_kernels.attention``. A pool of FP8 is in the type that the device has for it."""
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = pool.shape[1]
    heads = all_heads - 2 * kv_heads
    if qkv.stride(-1) != 1:
        raise ValueError(f"each head must be contiguous, not strided by {qkv.stride(-1)}")
    if head_dim % 2 or head_dim != pool.shape[-1]:
        raise ValueError(f"heads of {head_dim}: allowed is an even size, and the pool's, {pool.shape[-1]}")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.numel() != tokens * head_dim or angles.dtype != torch.float32 or not angles.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(angles.shape)} {angles.dtype}; allowed: contiguous "
                f"({tokens}, 1, {head_dim}) float32"
            )
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        q_weight, k_weight = (cos, cos) if norm is None else (norm.q, norm.k)
        _rotate_and_store[(tokens, triton.cdiv(all_heads, HEADS))](
            qkv,
            cos,
            sin,
            q_weight,
            k_weight,
            out,
            pool,
            batch.slot_blocks,
            batch.slot_offsets,
            layer,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            *scales.factors,
            qkv.stride(0),
            qkv.stride(1),
            *pool.stride()[:3],
            QUERY_HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=pool.shape[-2],
            HAS_NORM=norm is not None,
            HEADS=HEADS,
            DIMS=max(16, next_power_of_two(head_dim // 2)),
            num_warps=max(2, next_power_of_two(head_dim) // 32),
            enable_fp_fusion=True,
        )
    return out
