"""The MLPs of a mixture's experts: each token goes through the experts that were chosen for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.activation import activated, gated
from baton_kernels.expert_tensors import ExpertTensors


def multiply(
    x: Tensor, experts: Tensor, weights: Tensor, tensors: ExpertTensors, weighs_input: bool
) -> Tensor:
    """Computes like ``loop_over_experts``, by the kernels of a CUDA device there. On a CPU they want packed
    weights: ``baton_kernels.cpu.experts``."""
    if x.device.type == "cuda":
        from baton_kernels.cuda import experts as kernels  # triton is only there where CUDA is

        if not tensors.is_gated:
            raise NotImplementedError("experts without gates need kernels in baton_kernels.cuda.experts")
        return kernels.multiply(x, experts, weights, tensors, weighs_input)
    return loop_over_experts(x, experts, weights, tensors, weighs_input)


def warm_up(tensors: ExpertTensors, top_k: int, weighs_input: bool) -> None:
    """Launches every kernel that ``multiply`` launches for these tensors, whatever the number of tokens. On a
    CPU there is nothing to launch."""
    if tensors.down.device.type == "cuda":
        from baton_kernels.cuda import experts as kernels

        kernels.warm_up(tensors, top_k, weighs_input)


def loop_over_experts(
    x: Tensor, experts: Tensor, weights: Tensor, tensors: ExpertTensors, weighs_input: bool
) -> Tensor:
    """x [T, hidden], experts [T, k] int32, weights [T, k] float32 -> [T, hidden], of x's type: the sum over
    each token's experts of down(gated(gate(x), up(x))), or down(activated(up(x))), times their weight. By
    plain torch, expert by expert; sums are in float32.

    ``weighs_input``: the weight multiplies x instead."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(tensors.gate_up)):
        rows, place = (experts == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        factor, taken = weights[rows, place, None], x[rows]
        if weighs_input:
            taken = (taken * factor).to(x.dtype)
        bias = None if tensors.gate_up_bias is None else tensors.gate_up_bias[expert]
        both = F.linear(taken, tensors.gate_up[expert], bias)
        if tensors.is_gated:
            gate, up = both.chunk(2, -1)
            inner = gated(gate, up, tensors.activation)
        else:
            inner = activated(both, tensors.activation)
        bias = None if tensors.down_bias is None else tensors.down_bias[expert]
        result = F.linear(inner, tensors.down[expert], bias).float()
        out.index_add_(0, rows, result if weighs_input else result * factor)
    return out.to(x.dtype)
