"""Experts of few pairs of a token and an expert, each multiplied by itself, as in a decode step.

A program takes some outputs of one pair, or of all experts of one token, and reads the rows of weights that
they need. Programs of pairs that share an expert run at the same time, and all but one find its weights in
the second-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.activation import gated
from baton_kernels.cuda.expert_shapes import ExpertStep
from baton_kernels.cuda.launch import bound

COLUMNS = 4
"""Outputs of a program."""


@bound
@triton.jit(do_not_specialize_on_alignment=["experts", "weights"])
def _gate_up_of_few(
    x: tl.tensor,
    gate_up: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < INNER
    expert = tl.load(experts + pair).to(tl.int64)
    token = x + pair // TOP_K * x_stride
    rows = gate_up + expert * expert_stride + columns[:, None].to(tl.int64) * row_stride
    of_gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    of_up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for at in range(0, HIDDEN, DEPTH):
        depth = at + tl.arange(0, DEPTH)
        own = real[:, None] & (depth < HIDDEN)[None, :]
        taken = tl.load(token + depth, mask=depth < HIDDEN, other=0.0).to(tl.float32)[None, :]
        places = rows + depth[None, :]
        of_gate += tl.load(places, mask=own, other=0.0).to(tl.float32) * taken
        places += INNER * row_stride.to(tl.int64)
        of_up += tl.load(places, mask=own, other=0.0).to(tl.float32) * taken
    gate = tl.sum(of_gate, 1)
    up = tl.sum(of_up, 1)
    if WEIGHS_INPUT:
        weight = tl.load(weights + pair)
        gate *= weight
        up *= weight
    if HAS_BIAS:
        of_expert = bias + expert * (2 * INNER) + columns
        gate += tl.load(of_expert, mask=real, other=0.0).to(tl.float32)
        up += tl.load(of_expert + INNER, mask=real, other=0.0).to(tl.float32)
    result = gated(gate, up, limit, ACTIVATION)
    tl.store(out + pair * INNER + columns, result.to(out.dtype.element_ty), mask=real)


@bound
@triton.jit(do_not_specialize_on_alignment=["experts", "weights"])
def _down_of_few(
    inner: tl.tensor,
    down: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < HIDDEN
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts + pair).to(tl.int64)
        weight = 1.0
        if not WEIGHS_INPUT:
            weight = tl.load(weights + pair)
        rows = down + expert * expert_stride + columns[:, None].to(tl.int64) * row_stride
        for at in range(0, INNER, DEPTH):
            depth = at + tl.arange(0, DEPTH)
            own = real[:, None] & (depth < INNER)[None, :]
            taken = tl.load(inner + pair * INNER + depth, mask=depth < INNER, other=0.0).to(tl.float32)
            taken *= weight
            sums += tl.load(rows + depth[None, :], mask=own, other=0.0).to(tl.float32) * taken[None, :]
        if HAS_BIAS:
            of_expert = tl.load(bias + expert * HIDDEN + columns, mask=real, other=0.0).to(tl.float32)
            biases += of_expert * weight
    result = tl.sum(sums, 1) + biases
    tl.store(out + token * HIDDEN + columns, result.to(out.dtype.element_ty), mask=real)


def multiply_few(step: ExpertStep) -> Tensor:
    """The results of a step of few pairs: [T, hidden]."""
    x, tensors, shape = step.x, step.tensors, step.shape
    top_k = step.experts.shape[1]
    inner = torch.empty((step.pairs, shape.inner), dtype=x.dtype, device=x.device)
    out = torch.empty((len(x), shape.hidden), dtype=x.dtype, device=x.device)
    how = {
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "TOP_K": top_k,
        "WEIGHS_INPUT": step.weighs_input,
        "COLUMNS": COLUMNS,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    _gate_up_of_few[(step.pairs, triton.cdiv(shape.inner, COLUMNS))](
        x,
        tensors.gate_up,
        tensors.gate_up if tensors.gate_up_bias is None else tensors.gate_up_bias,
        step.experts,
        step.weights,
        inner,
        step.x_stride,
        *tensors.gate_up.stride()[:2],
        tensors.activation.number,
        ACTIVATION=tensors.activation.kind,
        HAS_BIAS=tensors.gate_up_bias is not None,
        DEPTH=shape.few_depth(shape.hidden),
        **how,
    )
    _down_of_few[(len(x), triton.cdiv(shape.hidden, COLUMNS))](
        inner,
        tensors.down,
        tensors.down if tensors.down_bias is None else tensors.down_bias,
        step.experts,
        step.weights,
        out,
        *tensors.down.stride()[:2],
        HAS_BIAS=tensors.down_bias is not None,
        DEPTH=shape.few_depth(shape.inner),
        **how,
    )
    return out
