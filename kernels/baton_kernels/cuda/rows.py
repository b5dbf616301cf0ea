"""Kernels that go through rows once: each fuses what would otherwise be several passes over memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.activation import Activation
from baton_kernels.activation_kind import GATED, UNGATED
from baton_kernels.cuda.activation import active, gated
from baton_kernels.cuda.kv_codes import codes
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.rounding import RoundedTarget, store_rounded, warps_of
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.kv_fp8 import UNSCALED, KVScales
from baton_kernels.norm import Norm
from baton_kernels.paged import PagedBatch
from baton_kernels.rounded_rows import RoundedRows, RowRounding

TYPES: Mapping[torch.dtype, tl.dtype] = MappingProxyType(
    {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
)
"""The types of activations, as kernels name them."""
COLUMNS = 1024
"""The number of columns of a program that computes activations."""


@bound
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["blocks", "offsets"])
def _write(
    pool: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    blocks: tl.tensor,
    offsets: tl.tensor,
    layer: tl.tensor,
    k_factor: tl.tensor,
    v_factor: tl.tensor,
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
    tl.store(pool + slot + dims, codes(key, k_factor, pool.dtype.element_ty), mask=real)
    values = pool + slot + BLOCK_SIZE * HEAD_DIM
    tl.store(values + dims, codes(value, v_factor, pool.dtype.element_ty), mask=real)


def write_kv(
    pool: Tensor, layer: int, k: Tensor, v: Tensor, batch: PagedBatch, scales: KVScales = UNSCALED
) -> None:
    """Store k and v, both [T, kv_heads, head_dim], in the slots of the step's tokens. A pool of FP8 is in the
    type that the device has for it."""
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
        *scales.factors,
        *k.stride()[:2],
        *v.stride()[:2],
        *pool.stride()[:3],
        BLOCK_SIZE=pool.shape[-2],
        HEAD_DIM=head_dim,
        DIMS=max(16, next_power_of_two(head_dim)),
        num_warps=1,
        enable_fp_fusion=True,
    )


@triton.jit
def _normed(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """The norm of a row x [SIZE] float32, which is 0 from column ``size`` on and stays so."""
    real = columns < size
    if CENTERED:
        x = tl.where(real, x - tl.sum(x, 0) / size, 0.0)
    normal = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    normal *= tl.load(weight + columns, mask=real, other=0.0).to(tl.float32) + offset
    if HAS_BIAS:
        normal += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)
    return normal


@bound
@triton.jit
def _add_norm(
    x: tl.tensor,
    residual: tl.tensor,
    post_weight: tl.tensor,
    post_bias: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    scale: tl.tensor,
    factor: tl.tensor,
    post_eps: tl.tensor,
    post_offset: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    size: tl.tensor,
    SIZE: tl.constexpr,
    HAS_X: tl.constexpr,
    HAS_POST: tl.constexpr,
    POST_CENTERED: tl.constexpr,
    HAS_POST_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    real = columns < size
    total = tl.load(residual + row * size + columns, mask=real, other=0.0).to(tl.float32)
    if HAS_X:
        added = tl.load(x + row * size + columns, mask=real, other=0.0).to(tl.float32)
        if HAS_POST:
            added = _normed(
                added, post_weight, post_bias, columns, size, post_eps, post_offset, POST_CENTERED,
                HAS_POST_BIAS,
            )  # fmt: skip
        total += added * factor
        tl.store(residual + row * size + columns, total.to(residual.dtype.element_ty), mask=real)
    if HAS_NORM:
        total = _normed(total, weight, bias, columns, size, eps, offset, CENTERED, HAS_BIAS)
    if TYPE is None:
        tl.store(out + row * size + columns, total.to(out.dtype.element_ty), mask=real)
    else:
        total = total.to(DTYPE).to(tl.float32)
        store_rounded(total, out, scales, scale, row, size, TYPE, GROUP, HAS_SCALE, SIZE)


def add_norm(
    x: Tensor | None,
    residual: Tensor,
    norm: Norm | None,
    dtype: torch.dtype,
    *,
    post: Norm | None = None,
    factor: float = 1.0,
) -> Tensor:
    """x, residual [T, size] -> [T, size] ``dtype``: ``residual`` becomes residual + factor * post(x) (x None:
    stays), and the result is its norm. None for ``post`` or ``norm``: as it is."""
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    into = {"DTYPE": None, "TYPE": None, "GROUP": 0, "HAS_SCALE": False}
    _add_norm_into((out, out, out), into, residual.shape[1], x, residual, norm, post, factor)
    return out


def add_norm_rounded(
    x: Tensor | None,
    residual: Tensor,
    norm: Norm | None,
    dtype: torch.dtype,
    rounding: RowRounding,
    *,
    post: Norm | None = None,
    factor: float = 1.0,
) -> RoundedRows:
    """Does what :func:`add_norm` does, and rounds the result, which is not stored."""
    rows, size = residual.shape
    target = RoundedTarget.of(rows, size, rounding, residual.device)
    into = {"DTYPE": TYPES[dtype], **target.constants}
    _add_norm_into(target.tensors, into, target.columns, x, residual, norm, post, factor)
    return target.rows


def _add_norm_into(
    out: tuple[Tensor, Tensor, Tensor],
    into: Mapping[str, object],
    columns: int,
    x: Tensor | None,
    residual: Tensor,
    norm: Norm | None,
    post: Norm | None,
    factor: float,
) -> None:
    """Launches the kernel of norms. ``out``: the result, or codes, scales and one scale, as ``into`` says.
    ``columns``: those of a program, before they are rounded up."""
    rows, size = residual.shape
    if not ((x is None or x.is_contiguous()) and residual.is_contiguous()):
        distances = [each.stride(0) for each in (x, residual) if each is not None]
        raise ValueError(f"rows must lie behind each other, not {distances} apart")
    if not rows:
        return
    columns = next_power_of_two(columns)
    first, second = _Parts.of(post, residual), _Parts.of(norm, residual)
    _add_norm[(rows,)](
        residual if x is None else x,
        residual,
        *first.tensors,
        *second.tensors,
        *out,
        factor,
        *first.numbers,
        *second.numbers,
        size,
        SIZE=columns,
        HAS_X=x is not None,
        HAS_POST=post is not None,
        POST_CENTERED=first.centered,
        HAS_POST_BIAS=first.has_bias,
        HAS_NORM=norm is not None,
        CENTERED=second.centered,
        HAS_BIAS=second.has_bias,
        **into,
        num_warps=warps_of(columns),
        enable_fp_fusion=True,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """A norm as the kernel takes it."""

    tensors: tuple[Tensor, Tensor]
    """Weight and bias, or what stands in their places."""
    numbers: tuple[float, float]
    """eps and offset."""
    centered: bool
    has_bias: bool

    @classmethod
    def of(cls, norm: Norm | None, unused: Tensor) -> _Parts:
        if norm is None:
            return cls((unused, unused), (0.0, 0.0), False, False)
        bias = norm.bias if norm.centered else None
        tensors = (norm.weight, unused if bias is None else bias)
        return cls(tensors, (norm.eps, norm.offset), norm.centered, bias is not None)


@bound
@triton.jit
def _gated_product(
    gate_up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=real, other=0.0).to(tl.float32)
    product = gated(gate, up, limit, KIND)
    tl.store(out + row * size + columns, product.to(out.dtype.element_ty), mask=real)


def gated_product(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * size] -> the activated gate times up, [T, size], rounded once."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = _empty_rows(gate_up, size)
    if rows:
        _gated_product[(rows, triton.cdiv(size, COLUMNS))](
            gate_up,
            out,
            size,
            gate_up.stride(0),
            activation.number,
            COLUMNS=COLUMNS,
            KIND=activation.kind,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@bound
@triton.jit(do_not_specialize_on_alignment=["scale"])
def _gated_rounded(
    gate_up: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    real = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=real, other=0.0).to(tl.float32)
    product = gated(gate, up, limit, KIND).to(gate_up.dtype.element_ty).to(tl.float32)
    product = tl.where(real, product, 0.0)
    store_rounded(product, codes, scales, scale, row, size, TYPE, GROUP, HAS_SCALE, SIZE)


def gated_product_rounded(gate_up: Tensor, activation: Activation, rounding: RowRounding) -> RoundedRows:
    """Does what :func:`gated_product` does, and rounds the result, which is not stored."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    _check_rows(gate_up)
    target = RoundedTarget.of(rows, size, rounding, gate_up.device)
    if rows:
        _gated_rounded[(rows,)](
            gate_up,
            *target.tensors,
            size,
            gate_up.stride(0),
            activation.number,
            KIND=activation.kind,
            **target.constants,
            SIZE=target.columns,
            num_warps=warps_of(target.columns),
            enable_fp_fusion=True,
        )
    return target.rows


@bound
@triton.jit
def _activated(
    x: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < size
    given = tl.load(x + row * row_stride + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, active(given, KIND).to(out.dtype.element_ty), mask=real)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each number of x [T, size], rounded once. ValueError for a kind that needs a gate."""
    if activation.kind in GATED:
        raise ValueError(f"activation is {activation.kind}; allowed without a gate: {', '.join(UNGATED)}")
    rows, size = x.shape
    out = _empty_rows(x, size)
    if rows:
        _activated[(rows, triton.cdiv(size, COLUMNS))](
            x,
            out,
            size,
            x.stride(0),
            COLUMNS=COLUMNS,
            KIND=activation.kind,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def _empty_rows(x: Tensor, size: int) -> Tensor:
    """Memory for a row of ``size`` for each row of x. ValueError if these are strided."""
    _check_rows(x)
    return torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)


def _check_rows(x: Tensor) -> None:
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"a row must be contiguous, not strided by {x.stride(1)}")
