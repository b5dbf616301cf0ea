"""Matmuls with quantized weights, by the kernels of the weights' device where there are any."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.activation_kind import Activation
from baton_kernels.expert_tensors import ExpertTensors, QuantizedExpertTensors
from baton_kernels.experts import loop_over_experts
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.rows import activated, gated_product


def multiply_quantized(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [..., inputs] -> [..., outputs], of ``out_dtype`` (None: the type of x): the product, plus the bias,
    through the activation; ``gated``: the activated first half times the second."""
    product = F.linear(x, weight.dequantized().to(x.dtype), bias)
    if activation is not None:
        product = (gated_product if gated else activated)(product, activation)
    return product if out_dtype is None else product.to(out_dtype)


def multiply_quantized_experts(
    x: Tensor, experts: Tensor, weights: Tensor, tensors: QuantizedExpertTensors, weighs_input: bool
) -> Tensor:
    """Computes like ``loop_over_experts`` with the weights that the codes stand for."""
    gate_up, down = (weight.dequantized().to(x.dtype) for weight in (tensors.gate_up, tensors.down))
    plain = ExpertTensors(gate_up, down, tensors.gate_up_bias, tensors.down_bias, tensors.activation)
    return loop_over_experts(x, experts, weights, plain, weighs_input)


def warm_up(tensors: QuantizedExpertTensors, top_k: int, weighs_input: bool) -> None:
    """Launches every kernel that ``multiply_quantized_experts`` launches for these tensors."""
