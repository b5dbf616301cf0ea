"""Products with quantized weights: by the kernels of a CUDA device there, by plain torch elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.activation_kind import Activation
from baton_kernels.expert_tensors import QuantizedExpertTensors
from baton_kernels.experts import loop_over_experts
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.rounded_rows import RoundedRows, RowRounding
from baton_kernels.rows import activated, gated_product


def multiply_quantized(
    x: Tensor | RoundedRows,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [T, inputs] -> x weight^T + bias [T, outputs], activated; where ``gated`` the activated first half of
    the outputs times the second. The result is of ``out_dtype`` (None: x's type).

    A CUDA device takes x rounded as :func:`rounding_of` says, or rounds it so itself; ``out_dtype`` has to be
    given for rounded rows. Elsewhere x has any leading dimensions, and the whole weight is dequantized at
    each call. ValueError for operands that no kernel takes."""
    if weight.device.type == "cuda":
        from baton_kernels.cuda import quantized  # triton is only there where CUDA is
        from baton_kernels.cuda.products import Finish

        return quantized.multiply(x, weight, Finish(bias, gated, activation), out_dtype)
    if isinstance(x, RoundedRows):
        raise ValueError(f"x is rounded; allowed on {weight.device.type}: plain rows")
    product = F.linear(x, weight.dequantized().to(x.dtype), bias)
    if activation is not None:
        product = (gated_product if gated else activated)(product, activation)
    return product if out_dtype is None else product.to(out_dtype)


def rounding_of(weight: QuantizedWeight) -> RowRounding | None:
    """The rounding of activations in front of a weight on its device; None: none. What computes them may
    round them (``baton_kernels.rows``), so that they are written and read once, as :class:`RoundedRows`."""
    if weight.device.type != "cuda":
        return None
    from baton_kernels.cuda import rounded
    from baton_kernels.cuda.expert_shapes import device_of

    return rounded.rounding_of(weight, device_of(weight.device))


def warm_up(
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    gated: bool = False,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Launches every kernel that :func:`multiply_quantized` launches for this weight, or for others of its
    sizes, with rows of ``dtype``, whatever their number. On a CPU there is nothing to launch."""
    if weight.device.type == "cuda":
        from baton_kernels.cuda import quantized
        from baton_kernels.cuda.products import Finish

        quantized.warm_up(weight, Finish(bias, gated, activation), dtype, out_dtype)


def multiply_quantized_experts(
    x: Tensor, experts: Tensor, weights: Tensor, tensors: QuantizedExpertTensors, weighs_input: bool
) -> Tensor:
    """Computes like ``baton_kernels.experts.loop_over_experts`` over dequantized weights. Activations are not
    rounded. Elsewhere than on CUDA, the weights of one expert at a time are dequantized."""
    if x.device.type == "cuda":
        from baton_kernels.cuda import experts as kernels

        if not tensors.is_gated:
            raise NotImplementedError("experts without gates need kernels in baton_kernels.cuda.experts")
        return kernels.multiply(x, experts, weights, tensors, weighs_input)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(experts.flatten().tolist())):
        rows, place = (experts == expert).nonzero(as_tuple=True)
        own = weights[rows, place, None]
        first = torch.zeros(own.shape, dtype=torch.int32, device=x.device)
        found = loop_over_experts(x[rows], first, own, tensors.of_expert(expert), weighs_input)
        out.index_add_(0, rows, found.float())
    return out.to(x.dtype)


def warm_up_experts(tensors: QuantizedExpertTensors, top_k: int, weighs_input: bool) -> None:
    """Launches every kernel that :func:`multiply_quantized_experts` launches for these tensors, whatever the
    number of tokens."""
    if tensors.down.device.type == "cuda":
        from baton_kernels.cuda import experts as kernels

        kernels.warm_up(tensors, top_k, weighs_input)
