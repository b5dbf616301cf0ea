"""Operations on rows by the CPU's kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton_kernels.cpu.library import KINDS, Native, native, pointer
from baton_kernels.norm import Norm
from baton_kernels.rotary import WholeNorm


class NativeNorm(ctypes.Structure):
    """A norm as the kernels read it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("centered", ctypes.c_int),
    )

    @classmethod
    def of(cls, norm: Norm | None) -> NativeNorm:
        """The norm's; None: one that changes nothing."""
        if norm is None:
            return cls()
        bias = norm.bias if norm.centered else None
        return cls(norm.weight.data_ptr(), pointer(bias), norm.eps, norm.offset, norm.centered)


def takes(norm: Norm | None, dtype: torch.dtype) -> bool:
    """Whether the kernels apply the norm to make rows of ``dtype``."""
    if norm is None:
        return True
    if norm.weight.dtype != dtype or not norm.weight.is_contiguous():
        return False
    return norm.bias is None or (norm.bias.dtype == dtype and norm.bias.is_contiguous())


def add_norm(
    x: Tensor | None,
    residual: Tensor,
    norm: Norm | None,
    dtype: torch.dtype,
    post: Norm | None,
    factor: float,
) -> Tensor | None:
    """See ``baton_kernels.rows.add_norm``; None for inputs that the kernels do not take."""
    kind = KINDS.get(dtype)
    x_kind = kind if x is None else KINDS.get(x.dtype)
    if residual.dtype != torch.float32 or not residual.is_contiguous() or kind is None or x_kind is None:
        return None
    if (x_kind and not kind) or (x is not None and not x.is_contiguous()):
        return None
    kernels = native()
    if kernels is None or not takes(norm, dtype) or not takes(post, dtype):
        return None
    out = torch.empty(residual.shape, dtype=dtype)
    of_norm = None if norm is None else NativeNorm.of(norm)
    of_post = None if post is None else NativeNorm.of(post)
    kernels.add_norm(
        x_kind,
        kind,
        pointer(x),
        residual.data_ptr(),
        None if of_norm is None else ctypes.addressof(of_norm),
        None if of_post is None else ctypes.addressof(of_post),
        factor,
        residual.numel() // residual.shape[-1],
        residual.shape[-1],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def squares_of_heads(qkv: Tensor, norm: WholeNorm) -> Tensor | None:
    """See ``baton_kernels.rows.squares_of_heads``; None for inputs that the kernels do not take."""
    kernels = _kernels_for(qkv, norm)
    if kernels is None:
        return None
    squares = torch.empty((len(qkv), 2), dtype=torch.float32)
    kernels.squares_of_heads(
        KINDS[qkv.dtype],
        qkv.data_ptr(),
        qkv.shape[1],
        norm.q.numel(),
        norm.k.numel(),
        len(qkv),
        squares.data_ptr(),
        torch.get_num_threads(),
    )
    return squares


def scale_heads(qkv: Tensor, squares: Tensor, norm: WholeNorm, sizes: tuple[int, int]) -> bool:
    """See ``baton_kernels.rows.scale_heads``; False, and nothing done, for inputs that the kernels do not
    take."""
    kernels = _kernels_for(qkv, norm)
    if kernels is None or squares.dtype != torch.float32 or not squares.is_contiguous():
        return False
    kernels.scale_heads(
        KINDS[qkv.dtype],
        qkv.data_ptr(),
        norm.q.data_ptr(),
        norm.k.data_ptr(),
        qkv.shape[1],
        norm.q.numel(),
        norm.k.numel(),
        norm.eps,
        norm.offset,
        len(qkv),
        squares.data_ptr(),
        (ctypes.c_int64 * 2)(*sizes),
        torch.get_num_threads(),
    )
    return True


def _kernels_for(qkv: Tensor, norm: WholeNorm) -> Native | None:
    weights = norm.q, norm.k
    fits = qkv.dtype in KINDS and qkv.is_contiguous() and qkv.dim() == 2
    same = all(w.dtype == qkv.dtype and w.is_contiguous() for w in weights)
    return native() if fits and same else None
