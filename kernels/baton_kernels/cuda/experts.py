"""The MLPs of a mixture's experts, whatever experts were chosen.

The host knows only how many pairs of a token and an expert there are. It reads nothing back, and launches the
same grids over memory of the same sizes for as many tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.cuda.expert_shapes import ExpertShape, ExpertStep, device_of, token_counts
from baton_kernels.cuda.few_experts import multiply_few
from baton_kernels.cuda.many_experts import multiply_many
from baton_kernels.cuda.weight_tiles import in_code_order
from baton_kernels.expert_tensors import ExpertTensors, QuantizedExpertTensors


def multiply(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    tensors: ExpertTensors | QuantizedExpertTensors,
    weighs_input: bool,
    shape: ExpertShape | None = None,
) -> Tensor:
    """Does what ``baton_kernels.experts.loop_over_experts`` does. ``shape``: the tile sizes; None: those of
    x's device. Each expert must be one of the tensors'."""
    shape = shape or ExpertShape.of(tensors, device_of(x.device))
    taken = in_code_order(x, tensors.gate_up)
    step = ExpertStep(taken, experts, weights, tensors, weighs_input, shape)
    if not step.pairs:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return multiply_few(step) if step.pairs <= step.shape.most_few else multiply_many(step)


def warm_up(
    tensors: ExpertTensors | QuantizedExpertTensors,
    top_k: int,
    weighs_input: bool,
    shape: ExpertShape | None = None,
) -> None:
    """Launches every kernel that ``multiply`` launches for these tensors, or for others of their sizes,
    whatever the number of tokens."""
    device = tensors.down.device
    shape = shape or ExpertShape.of(tensors, device_of(device))
    for tokens in token_counts(shape, top_k):
        x = torch.zeros((tokens, shape.hidden), dtype=shape.dtype, device=device)
        experts = torch.zeros((tokens, top_k), dtype=torch.int32, device=device)
        weights = torch.zeros((tokens, top_k), dtype=torch.float32, device=device)
        multiply(x, experts, weights, tensors, weighs_input, shape)
