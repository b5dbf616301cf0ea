"""An RMS norm over all query heads of a token together, and one over all its key heads, in place.

Where ranks share the heads, each sums its own squares (:func:`squares_of_heads`), the ranks add their sums,
and each scales its own heads (:func:`scale_heads`). One rank alone does both in one launch
(:func:`norm_heads`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.rotary import WholeNorm


@bound
@triton.jit
def _squares(
    qkv: tl.tensor,
    squares: tl.tensor,
    q_size: tl.tensor,
    k_size: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # 0: the queries, 1: the keys
    columns = tl.arange(0, SIZE)
    own = columns < (1 - part) * q_size + part * k_size
    x = tl.load(qkv + row * row_stride + part * q_size + columns, mask=own, other=0.0).to(tl.float32)
    tl.store(squares + row * 2 + part, tl.sum(x * x, 0))


@bound
@triton.jit
def _whole_norm(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    squares: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    q_size: tl.tensor,
    k_size: tl.tensor,
    q_count: tl.tensor,
    k_count: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # 0: the queries, 1: the keys
    columns = tl.arange(0, SIZE)
    q_own = (1 - part) * q_size
    k_own = part * k_size
    own = columns < q_own + k_own
    place = qkv + row * row_stride + part * q_size + columns
    x = tl.load(place, mask=own, other=0.0).to(tl.float32)
    total = tl.load(squares + row * 2 + part) if SUMMED else tl.sum(x * x, 0)
    of_query = tl.load(q_weight + columns, mask=columns < q_own, other=0.0).to(tl.float32)
    of_key = tl.load(k_weight + columns, mask=columns < k_own, other=0.0).to(tl.float32)
    mean = total / ((1 - part) * q_count + part * k_count)
    normal = x * tl.rsqrt(mean + eps) * (of_query + of_key + offset)
    tl.store(place, normal.to(qkv.dtype.element_ty), mask=own)


def squares_of_heads(qkv: Tensor, norm: WholeNorm) -> Tensor:
    """qkv [T, columns], first the queries, then the keys, as ``norm`` has weights for them -> [T, 2] float32:
    the sums of the squares of a row's queries, and of its keys."""
    q_size, k_size = _sizes(qkv, norm)
    squares = torch.empty((qkv.shape[0], 2), dtype=torch.float32, device=qkv.device)
    if len(qkv):
        columns = next_power_of_two(max(q_size, k_size))
        _squares[(len(qkv), 2)](
            qkv,
            squares,
            q_size,
            k_size,
            qkv.stride(0),
            SIZE=columns,
            num_warps=_warps(columns),
            enable_fp_fusion=True,
        )
    return squares


def scale_heads(qkv: Tensor, squares: Tensor, norm: WholeNorm, sizes: tuple[int, int]) -> None:
    """Norms the queries and the keys of qkv, as :func:`squares_of_heads` takes it, in place.

    ``squares`` [T, 2] float32: the sums over all ranks, of ``sizes`` numbers of queries and of keys."""
    if squares.shape != (len(qkv), 2) or squares.dtype != torch.float32 or not squares.is_contiguous():
        raise ValueError(
            f"squares are {tuple(squares.shape)} {squares.dtype}; allowed: contiguous ({len(qkv)}, 2) float32"
        )
    _scale(qkv, squares, norm, sizes)


def norm_heads(qkv: Tensor, norm: WholeNorm) -> None:
    """Does what :func:`squares_of_heads` and :func:`scale_heads` do where one rank has all heads."""
    _scale(qkv, None, norm, (norm.q.numel(), norm.k.numel()))


def _scale(qkv: Tensor, squares: Tensor | None, norm: WholeNorm, counts: tuple[int, int]) -> None:
    q_size, k_size = _sizes(qkv, norm)
    if len(qkv):
        columns = next_power_of_two(max(q_size, k_size))
        _whole_norm[(len(qkv), 2)](
            qkv,
            norm.q,
            norm.k,
            qkv if squares is None else squares,
            norm.eps,
            norm.offset,
            q_size,
            k_size,
            *counts,
            qkv.stride(0),
            SIZE=columns,
            SUMMED=squares is not None,
            num_warps=_warps(columns),
            enable_fp_fusion=True,
        )


def _sizes(qkv: Tensor, norm: WholeNorm) -> tuple[int, int]:
    """Numbers of a row's queries, and of its keys. ValueError for a qkv that has no such rows."""
    sizes = (norm.q.numel(), norm.k.numel())
    if sum(sizes) > qkv.shape[1]:
        raise ValueError(f"weights of {sizes[0]} and {sizes[1]} for rows of {qkv.shape[1]}")
    if qkv.stride(1) != 1:
        raise ValueError(f"a row must be contiguous, not strided by {qkv.stride(1)}")
    return sizes


def _warps(columns: int) -> int:
    return min(16, max(1, columns // 512))
