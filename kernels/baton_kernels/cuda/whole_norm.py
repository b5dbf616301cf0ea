"""An RMS norm over all query heads of a token together, and one over all its key heads, in place.

Where ranks share the heads, each sums its own squares (:func:`squares`), the ranks add their sums, and each
scales its own heads (:func:`scale`). One rank alone does both in one launch (:func:`norm_whole`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two


@bound
@triton.jit
def _squares(
    qkv: tl.tensor,
    sums: tl.tensor,
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
    tl.store(sums + row * 2 + part, tl.sum(x * x, 0))


@bound
@triton.jit
def _whole_norm(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    sums: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    q_size: tl.tensor,
    k_size: tl.tensor,
    row_stride: tl.tensor,
    ranks: tl.tensor,
    SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # 0: the queries, 1: the keys
    columns = tl.arange(0, SIZE)
    q_own = (1 - part) * q_size
    k_own = part * k_size
    size = q_own + k_own
    own = columns < size
    place = qkv + row * row_stride + part * q_size + columns
    x = tl.load(place, mask=own, other=0.0).to(tl.float32)
    total = tl.load(sums + row * 2 + part) if SUMMED else tl.sum(x * x, 0)
    of_query = tl.load(q_weight + columns, mask=columns < q_own, other=0.0).to(tl.float32)
    of_key = tl.load(k_weight + columns, mask=columns < k_own, other=0.0).to(tl.float32)
    normal = x * tl.rsqrt(total / (size * ranks) + eps) * (of_query + of_key + offset)
    tl.store(place, normal.to(qkv.dtype.element_ty), mask=own)


def squares(qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
    """qkv [T, (heads + 2 * kv_heads) * head_dim] -> [T, 2] float32: the sums of the squares of each token's
    queries, and of its keys."""
    tokens, width = qkv.shape
    head_dim = width // (heads + 2 * kv_heads)
    _check_rows(qkv)
    sums = torch.empty((tokens, 2), dtype=torch.float32, device=qkv.device)
    if tokens:
        sizes = (heads * head_dim, kv_heads * head_dim)
        columns = next_power_of_two(max(sizes))
        _squares[(tokens, 2)](
            qkv, sums, *sizes, qkv.stride(0), SIZE=columns, num_warps=_warps(columns), enable_fp_fusion=True
        )
    return sums


def scale(
    qkv: Tensor, sums: Tensor, q: Tensor, k: Tensor, eps: float, *, ranks: int = 1, offset: float = 0.0
) -> None:
    """Norms the queries and keys of qkv, shaped as for :func:`squares`, in place.

    ``sums`` [T, 2] float32: the :func:`squares` of all ``ranks``, added. ``q`` [heads * head_dim] and ``k``
    [kv_heads * head_dim]: this rank's weights; ``offset`` is added to both.
    """
    if sums.shape != (qkv.shape[0], 2) or sums.dtype != torch.float32 or not sums.is_contiguous():
        raise ValueError(
            f"sums are {tuple(sums.shape)} {sums.dtype}; allowed: contiguous ({qkv.shape[0]}, 2) float32"
        )
    _scale(qkv, sums, q, k, eps, ranks, offset)


def norm_whole(qkv: Tensor, q: Tensor, k: Tensor, eps: float, *, offset: float = 0.0) -> None:
    """As :func:`squares` and then :func:`scale` of a rank that has all heads."""
    _scale(qkv, None, q, k, eps, 1, offset)


def _scale(
    qkv: Tensor, sums: Tensor | None, q: Tensor, k: Tensor, eps: float, ranks: int, offset: float
) -> None:
    tokens, width = qkv.shape
    sizes = (q.numel(), k.numel())
    _check_rows(qkv)
    if sizes[0] + 2 * sizes[1] != width:
        raise ValueError(f"weights of {sizes[0]} and {sizes[1]} for rows of {width} with keys and values")
    if tokens:
        columns = next_power_of_two(max(sizes))
        _whole_norm[(tokens, 2)](
            qkv,
            q,
            k,
            qkv if sums is None else sums,
            eps,
            offset,
            *sizes,
            qkv.stride(0),
            ranks,
            SIZE=columns,
            SUMMED=sums is not None,
            num_warps=_warps(columns),
            enable_fp_fusion=True,
        )


def _check_rows(qkv: Tensor) -> None:
    if qkv.stride(1) != 1:
        raise ValueError(f"a row must be contiguous, not strided by {qkv.stride(1)}")


def _warps(columns: int) -> int:
    return min(16, max(1, columns // 512))
