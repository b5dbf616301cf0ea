"""Operations on rows: by the kernels of the tensors' device, by plain torch where there are none.

A CUDA device must be the calling thread's current one (``torch.cuda.set_device``): kernels are launched
there.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.activation import SILU
from baton_kernels.cpu import rows as cpu_rows
from baton_kernels.norm import Norm


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * size] -> silu(gate) * up, [T, size]."""
    if gate_up.device.type == "cuda":
        from baton_kernels.cuda import rows  # triton is only there where CUDA is

        return rows.gated_product(gate_up, SILU)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, residual [T, size] -> [T, size], of the weight's type: ``residual`` becomes the sum of both (x None:
    stays), and the result is that sum / sqrt(mean(sum^2) + eps) * weight."""
    if residual.device.type == "cuda":
        from baton_kernels.cuda import rows

        return rows.add_norm(x, residual, Norm(weight, eps), weight.dtype)
    if residual.device.type == "cpu":
        normed = cpu_rows.add_rms_norm(x, residual, weight, eps)
        if normed is not None:
            return normed
    if x is not None:
        residual += x
    return F.rms_norm(residual, weight.shape, weight.to(residual.dtype), eps).to(weight.dtype)


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
