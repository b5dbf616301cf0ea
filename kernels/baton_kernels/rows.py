"""Operations on rows: by the kernels of the tensors' device, by plain torch where there are none.

A CUDA device must be the calling thread's current one (``torch.cuda.set_device``): kernels are launched
there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton_kernels import activation as plainly
from baton_kernels.activation_kind import Activation
from baton_kernels.cpu import rows as cpu_rows
from baton_kernels.norm import Norm
from baton_kernels.rotary import WholeNorm
from baton_kernels.rounded_rows import RoundedRows, RowRounding, round_rows


def gated_product(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * size] -> activated gate * up, [T, size]: see ``baton_kernels.activation``."""
    if gate_up.device.type == "cuda":
        from baton_kernels.cuda import rows  # triton is only there where CUDA is

        return rows.gated_product(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return plainly.gated(gate, up, activation)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The activation of each number of x [T, size]: see ``baton_kernels.activation``."""
    if x.device.type == "cuda":
        from baton_kernels.cuda import rows

        return rows.activated(x, activation)
    return plainly.activated(x, activation)


def add_norm(
    x: Tensor | None,
    residual: Tensor,
    norm: Norm | None,
    dtype: torch.dtype,
    *,
    post: Norm | None = None,
    factor: float = 1.0,
) -> Tensor:
    """x, residual [T, size] -> [T, size] of type ``dtype``: ``residual``, float32, grows by ``factor`` times
    x, or times the norm ``post`` of x (x None: stays), and the result is its ``norm`` (None: a copy)."""
    if residual.device.type == "cuda":
        from baton_kernels.cuda import rows

        return rows.add_norm(x, residual, norm, dtype, post=post, factor=factor)
    if residual.device.type == "cpu":
        normed = cpu_rows.add_norm(x, residual, norm, dtype, post, factor)
        if normed is not None:
            return normed
    if x is not None:
        added = x if post is None else post.of(x)
        residual += added if factor == 1 else added.float() * factor
    return residual.to(dtype, copy=True) if norm is None else norm.of(residual).to(dtype)


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
    """Does what :func:`add_norm` does, and rounds the result."""
    if residual.device.type == "cuda":
        from baton_kernels.cuda import rows

        return rows.add_norm_rounded(x, residual, norm, dtype, rounding, post=post, factor=factor)
    return round_rows(add_norm(x, residual, norm, dtype, post=post, factor=factor), rounding)


def gated_product_rounded(gate_up: Tensor, activation: Activation, rounding: RowRounding) -> RoundedRows:
    """Does what :func:`gated_product` does, and rounds the result."""
    if gate_up.device.type == "cuda":
        from baton_kernels.cuda import rows

        return rows.gated_product_rounded(gate_up, activation, rounding)
    return round_rows(gated_product(gate_up, activation), rounding)


def squares_of_heads(qkv: Tensor, norm: WholeNorm) -> Tensor:
    """qkv [T, columns], first the queries, then the keys, as ``norm`` has weights for them -> [T, 2] float32:
    the sums of the squares of a row's queries, and of its keys."""
    if qkv.device.type == "cuda":
        from baton_kernels.cuda import whole_norm

        return whole_norm.squares_of_heads(qkv, norm)
    if qkv.device.type == "cpu":
        squares = cpu_rows.squares_of_heads(qkv, norm)
        if squares is not None:
            return squares
    q, k, _ = _split(qkv, norm)
    return torch.stack((q.float().square().sum(-1), k.float().square().sum(-1)), dim=-1)


def scale_heads(qkv: Tensor, squares: Tensor, norm: WholeNorm, sizes: tuple[int, int]) -> None:
    """Norms the queries and the keys of qkv, as :func:`squares_of_heads` takes it, in place.

    ``squares`` [T, 2] float32: the sums over all ranks, of ``sizes`` numbers of queries and of keys."""
    if qkv.device.type == "cuda":
        from baton_kernels.cuda import whole_norm

        whole_norm.scale_heads(qkv, squares, norm, sizes)
        return
    if qkv.device.type == "cpu" and cpu_rows.scale_heads(qkv, squares, norm, sizes):
        return
    q, k, _ = _split(qkv, norm)
    for part, weight, square, size in zip((q, k), (norm.q, norm.k), squares.unbind(-1), sizes, strict=True):
        factor = torch.rsqrt(square / size + norm.eps)[:, None]
        part.copy_(part.float() * factor * (weight.float() + norm.offset))


def norm_heads(qkv: Tensor, norm: WholeNorm) -> None:
    """Does what :func:`squares_of_heads` and :func:`scale_heads` do where one rank has all heads."""
    if qkv.device.type == "cuda":
        from baton_kernels.cuda import whole_norm

        whole_norm.norm_heads(qkv, norm)
        return
    scale_heads(qkv, squares_of_heads(qkv, norm), norm, (norm.q.numel(), norm.k.numel()))


def _split(qkv: Tensor, norm: WholeNorm) -> tuple[Tensor, ...]:
    """qkv as queries, keys and the rest."""
    sizes = norm.q.numel(), norm.k.numel()
    return qkv.split_with_sizes([*sizes, qkv.shape[-1] - sum(sizes)], dim=-1)


def bar_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Sets the tokens that masks do not allow to -inf in ``logits`` [R, V] float32, in place.

    ``words`` [r, W] int32: a bit for each token, 32 tokens in a word, the lowest bit first. The i-th mask is
    for row ``rows[i]``, [r] int64.
    """
    if 32 * words.shape[1] < logits.shape[1]:
        raise ValueError(f"masks of {32 * words.shape[1]} tokens for logits of {logits.shape[1]}")
    if logits.device.type == "cuda":
        from baton_kernels.cuda import logits as kernels

        kernels.bar_tokens(logits, rows, words)
        return
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    barred = (words.view(torch.uint8)[:, :, None] >> bits & 1 == 0).flatten(1)[:, : logits.shape[1]]
    if rows.tolist() == list(range(len(logits))):
        logits.masked_fill_(barred, -math.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(barred, -math.inf)
