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
from baton_kernels.cuda.weight_tiles import groups_of, in_code_order, load_weights, row_factors

COLUMNS = 4
"""Outputs of a program."""


@bound
@triton.jit(do_not_specialize_on_alignment=["experts", "weights"])
def _gate_up_of_few(
    x: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    factors: tl.tensor,
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
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
) -> None:
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < INNER
    expert = tl.load(experts + pair).to(tl.int64)
    token = x + pair // TOP_K * x_stride
    # What lies beyond the end is computed over the first row, and not stored.
    own = tl.where(real, columns, 0).to(tl.int64)
    of_expert = expert * (2 * INNER) + own
    rows = expert * expert_stride + own * row_stride
    up_rows = rows + INNER * row_stride.to(tl.int64)
    groups = groups_of(of_expert, HIDDEN, GROUP)
    up_groups = groups + groups_of(INNER, HIDDEN, GROUP)
    of_gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    of_up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for at in range(0, HIDDEN, DEPTH):
        depth = at + tl.arange(0, DEPTH)
        taken = tl.load(token + depth, mask=depth < HIDDEN, other=0.0).to(tl.float32)[None, :]
        of_gate += taken * load_weights(
            gate_up, scales, zeros, rows, groups, at,
            HIDDEN, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
        ).to(tl.float32)  # fmt: skip
        of_up += taken * load_weights(
            gate_up, scales, zeros, up_rows, up_groups, at,
            HIDDEN, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
        ).to(tl.float32)  # fmt: skip
    gate = tl.sum(of_gate, 1) * row_factors(scales, factors, of_expert, GROUP, FORMAT, SCALE, HAS_FACTORS)
    of_expert += INNER
    up = tl.sum(of_up, 1) * row_factors(scales, factors, of_expert, GROUP, FORMAT, SCALE, HAS_FACTORS)
    if WEIGHS_INPUT:
        weight = tl.load(weights + pair)
        gate *= weight
        up *= weight
    if HAS_BIAS:
        gate += tl.load(bias + of_expert - INNER).to(tl.float32)
        up += tl.load(bias + of_expert).to(tl.float32)
    result = gated(gate, up, limit, ACTIVATION)
    tl.store(out + pair * INNER + columns, result.to(out.dtype.element_ty), mask=real)


@bound
@triton.jit(do_not_specialize_on_alignment=["experts", "weights"])
def _down_of_few(
    inner: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    factors: tl.tensor,
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
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < HIDDEN
    own = tl.where(real, columns, 0).to(tl.int64)
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts + pair).to(tl.int64)
        weight = 1.0
        if not WEIGHS_INPUT:
            weight = tl.load(weights + pair)
        of_expert = expert * HIDDEN + own
        rows = expert * expert_stride + own * row_stride
        groups = groups_of(of_expert, INNER, GROUP)
        factor = row_factors(scales, factors, of_expert, GROUP, FORMAT, SCALE, HAS_FACTORS)[:, None]
        for at in range(0, INNER, DEPTH):
            depth = at + tl.arange(0, DEPTH)
            taken = tl.load(inner + pair * INNER + depth, mask=depth < INNER, other=0.0).to(tl.float32)
            taken *= weight
            loaded = load_weights(
                down, scales, zeros, rows, groups, at,
                INNER, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
            )  # fmt: skip
            sums += loaded.to(tl.float32) * factor * taken[None, :]
        if HAS_BIAS:
            biases += tl.load(bias + of_expert).to(tl.float32) * weight
    total = tl.sum(sums, 1) + biases
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=real)


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
    gate_up, down = step.gate_up, step.down
    _gate_up_of_few[(step.pairs, triton.cdiv(shape.inner, COLUMNS))](
        x,
        *gate_up.tensors,
        gate_up.tensors[0] if tensors.gate_up_bias is None else tensors.gate_up_bias,
        step.experts,
        step.weights,
        inner,
        step.x_stride,
        *gate_up.strides,
        tensors.activation.number,
        ACTIVATION=tensors.activation.kind,
        HAS_BIAS=tensors.gate_up_bias is not None,
        DEPTH=gate_up.depth(shape.few_depth(shape.hidden)),
        **gate_up.constants,
        **how,
    )
    _down_of_few[(len(x), triton.cdiv(shape.hidden, COLUMNS))](
        in_code_order(inner, tensors.down),
        *down.tensors,
        down.tensors[0] if tensors.down_bias is None else tensors.down_bias,
        step.experts,
        step.weights,
        out,
        *down.strides,
        HAS_BIAS=tensors.down_bias is not None,
        DEPTH=down.depth(shape.few_depth(shape.inner)),
        **down.constants,
        **how,
    )
    return out
