"""Products with quantized weights, whose codes become numbers of the activations' type in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda import rounded
from baton_kernels.cuda.expert_shapes import device_of
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.products import (
    TILES_OF_A_GROUP,
    Finish,
    ProductTarget,
    check_operands,
    row_stride,
    store_product,
    tile_of_program,
)
from baton_kernels.cuda.quantized_shapes import TOKEN_COUNTS, ProductShape
from baton_kernels.cuda.rounding import round_rows
from baton_kernels.cuda.shapes import Device
from baton_kernels.cuda.weight_tiles import WeightOperand, groups_of, in_code_order, load_weights, row_factors
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.rounded_rows import RoundedRows


@bound
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["bias"])
def _multiply(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    row_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row_tile, column_tile = tile_of_program(tokens, ROWS, (OUTPUTS + COLUMNS - 1) // COLUMNS, GROUPED)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # What lies beyond the end is computed over the first row, and not stored.
    own = tl.where(column < OUTPUTS, column, 0).to(tl.int64)
    groups = groups_of(own, INPUTS, GROUP)
    depth = tl.arange(0, DEPTH)
    taken = x + tl.where(row < tokens, row, 0).to(tl.int64)[:, None] * x_stride + depth[None, :]
    product = tl.zeros([COLUMNS, ROWS], tl.float32)
    first = tl.program_id(1) * SPAN
    for at in range(first, tl.minimum(first + SPAN, INPUTS), DEPTH):
        if INPUTS % DEPTH == 0:
            a = tl.load(taken + at)
        else:
            a = tl.load(taken + at, mask=(at + depth < INPUTS)[None, :], other=0.0)
        b = load_weights(
            codes, scales, zeros, own * row_stride, groups, at,
            INPUTS, GROUP, FORMAT, SCALE, HAS_ZEROS, COLUMNS, DEPTH,
        )  # fmt: skip
        product = tl.dot(b.to(a.dtype), tl.trans(a), product, input_precision=PRECISION)
    product *= row_factors(scales, factors, own, GROUP, FORMAT, SCALE, HAS_FACTORS)[:, None]
    store_product(product, bias, out, row, column, tokens, OUTPUTS, WHOLE, HAS_BIAS, ACTIVATION)


def multiply(
    x: Tensor | RoundedRows,
    weight: QuantizedWeight,
    finish: Finish,
    out_dtype: torch.dtype | None = None,
    device: Device | None = None,
) -> Tensor:
    """x [T, inputs], of float32, bfloat16 or float16 -> [T, outputs], or half as many where a gate follows,
    of ``out_dtype`` (None: x's). The weight's numbers are rounded to x's type, and sums are float32.

    If the weight asks for rounded rows and the device has units for them, x is rounded first, or was already
    by who calls; ``out_dtype`` has to be given then. ``device``: what tiles are chosen for; None: x's.
    ValueError for operands that no kernel takes."""
    if isinstance(x, RoundedRows):
        if out_dtype is None:
            raise ValueError("out_dtype is None; allowed for rounded rows: a type")
        return rounded.multiply(x, weight, finish, out_dtype, device or device_of(x.codes.device))
    device = device or device_of(x.device)
    rounding = rounded.rounding_of(weight, device)
    if rounding is not None:
        return rounded.multiply(round_rows(x, rounding), weight, finish, out_dtype or x.dtype, device)
    return _multiply_plain(in_code_order(x, weight), weight, finish, out_dtype or x.dtype, device)


def _multiply_plain(
    x: Tensor, weight: QuantizedWeight, finish: Finish, out_dtype: torch.dtype, device: Device
) -> Tensor:
    """The product with rows of x, in the order of the codes, as they are."""
    outputs, inputs = weight.shape
    check_operands(x, inputs, finish)
    operand = WeightOperand.of(weight, device.arch)
    shape = ProductShape(outputs, inputs, operand.group, x.dtype, device)
    rows = shape.rows(len(x))
    tiling, span = shape.tiling(rows), shape.span(rows)
    target = ProductTarget.of(len(x), outputs, finish, out_dtype, x.device, -(-inputs // span), rows)
    if len(x):
        _multiply[target.grid(tiling)](
            x,
            *operand.tensors,
            operand.tensors[0] if finish.bias is None else finish.bias,
            target.product,
            len(x),
            row_stride(x),
            operand.strides[1],
            INPUTS=inputs,
            OUTPUTS=outputs,
            SPAN=span,
            **operand.constants,
            **target.constants,
            ROWS=rows,
            COLUMNS=tiling.tile,
            DEPTH=shape.depth(rows),
            GROUPED=TILES_OF_A_GROUP,
            PRECISION="ieee" if shape.exact else "tf32",
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            enable_fp_fusion=True,
        )
    return target.finished()


def warm_up(
    weight: QuantizedWeight, finish: Finish, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> None:
    """Launches every kernel that :func:`multiply` launches for this weight, or for others of its sizes, with
    rows of ``dtype``, whatever their number."""
    for tokens in TOKEN_COUNTS:
        x = torch.zeros((tokens, weight.shape[1]), dtype=dtype, device=weight.device)
        multiply(x, weight, finish, out_dtype)
