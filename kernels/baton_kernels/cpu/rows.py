"""Operations on rows by the CPU's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.cpu.library import KINDS, native


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """See ``baton_kernels.rows.add_rms_norm``; None for inputs that the kernels do not take."""
    kind = KINDS.get(weight.dtype)
    x_kind = kind if x is None else KINDS.get(x.dtype)
    if residual.dtype != torch.float32 or not residual.is_contiguous() or kind is None or x_kind is None:
        return None
    if (x_kind and not kind) or (x is not None and not x.is_contiguous()):
        return None
    kernels = native()
    if kernels is None:
        return None
    out = torch.empty(residual.shape, dtype=weight.dtype)
    kernels.add_norm(
        x_kind,
        kind,
        None if x is None else x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
        residual.numel() // residual.shape[-1],
        residual.shape[-1],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
