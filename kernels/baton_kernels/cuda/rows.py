"""Kernels that go through rows once: each fuses what would otherwise be several passes over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.paged import PagedBatch

COLUMNS = 1024
"""The number of columns of a program of ``_silu_mul``."""


@bound
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["blocks", "offsets"])
def _write(
    pool: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    blocks: tl.tensor,
    offsets: tl.tensor,
    layer: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    layer_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, DIMS)
    real = dims < HEAD_DIM
    slot = tl.load(blocks + token) * block_stride + head * head_stride + layer.to(tl.int64) * layer_stride
    slot += tl.load(offsets + token) * HEAD_DIM
    key = tl.load(k + token * k_token + head * k_head + dims, mask=real)
    value = tl.load(v + token * v_token + head * v_head + dims, mask=real)
    tl.store(pool + slot + dims, key, mask=real)
    tl.store(pool + slot + BLOCK_SIZE * HEAD_DIM + dims, value, mask=real)


def write_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, batch: PagedBatch) -> None:
    """Store k and v, both [T, kv_heads, head_dim], in the slots of the step's tokens."""
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(f"keys and values must be contiguous, not strided by {k.stride(-1)}, {v.stride(-1)}")
    _write[(tokens, kv_heads)](
        pool,
        k,
        v,
        batch.slot_blocks,
        batch.slot_offsets,
        layer,
        *k.stride()[:2],
        *v.stride()[:2],
        *pool.stride()[:3],
        BLOCK_SIZE=pool.shape[-2],
        HEAD_DIM=head_dim,
        DIMS=max(16, next_power_of_two(head_dim)),
        num_warps=1,
        enable_fp_fusion=True,
    )


@bound
@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    size: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    real = columns < size
    added = tl.load(x + row * size + columns, mask=real, other=0.0).to(tl.float32)
    added += tl.load(residual + row * size + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(residual + row * size + columns, added.to(residual.dtype.element_ty), mask=real)
    normal = added * tl.rsqrt(tl.sum(added * added, 0) / size + eps)
    scaled = normal * tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, scaled.to(out.dtype.element_ty), mask=real)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, residual [T, size] -> [T, size]: the norm of their sum, which ``residual`` holds afterwards."""
    rows, size = x.shape
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError(f"rows must lie behind each other, not {x.stride(0)}, {residual.stride(0)} apart")
    if rows:
        columns = next_power_of_two(size)
        warps = min(16, max(1, columns // 512))
        _add_rms_norm[(rows,)](
            x, residual, weight, out, eps, size, SIZE=columns, num_warps=warps, enable_fp_fusion=True
        )
    return out


@bound
@triton.jit
def _silu_mul(
    gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, row_stride: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=real, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, product.to(out.dtype.element_ty), mask=real)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * size] -> silu(gate) * up, [T, size], rounded once."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if gate_up.stride(1) != 1:
        raise ValueError(f"a row must be contiguous, not strided by {gate_up.stride(1)}")
    if rows:
        grid = (rows, triton.cdiv(size, COLUMNS))
        stride = gate_up.stride(0)
        _silu_mul[grid](gate_up, out, size, stride, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=True)
    return out
