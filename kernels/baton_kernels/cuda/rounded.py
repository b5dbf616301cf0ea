"""Products of rounded activations with weights of the same type, by the units for fp8 or int8.

The units add up fp8 products with fewer bits than float32 has, so sums of ``DEPTH`` inputs are added to
others in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from baton_kernels.cuda.quantized_shapes import MOST_FEW, ProductShape
from baton_kernels.cuda.rows import activated, gated_product
from baton_kernels.cuda.shapes import Device
from baton_kernels.cuda.weight_tiles import (
    FP8_ARCH,
    WeightOperand,
    groups_of,
    load_codes,
    row_factors,
    scale_values,
)
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.rounded_rows import RoundedRows, RowRounding

LEAST_DEPTH = 32
"""The least inputs of a tile that the units multiply."""
TORCH_SIZES = 16
"""A divisor of the sizes that ``torch._scaled_mm`` takes."""


@bound
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["bias"])
def _multiply_rounded(
    x: tl.tensor,
    x_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    factors: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPED: tl.constexpr,
) -> None:
    row_tile, column_tile = tile_of_program(tokens, ROWS, (OUTPUTS + COLUMNS - 1) // COLUMNS, GROUPED)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # What lies beyond the end is computed over the first row, and not stored.
    own = tl.where(column < OUTPUTS, column, 0).to(tl.int64)
    own_row = tl.where(row < tokens, row, 0).to(tl.int64)
    groups = groups_of(own, INPUTS, GROUP)
    x_groups = groups_of(own_row, INPUTS, X_GROUP)
    product = tl.zeros([COLUMNS, ROWS], tl.float32)
    first = tl.program_id(1) * SPAN
    for at in range(first, tl.minimum(first + SPAN, INPUTS), DEPTH):
        a = load_codes(x, own_row * x_stride, at, INPUTS, FORMAT, DEPTH)
        b = load_codes(codes, own * INPUTS, at, INPUTS, FORMAT, DEPTH)
        if FORMAT == "fp8":
            a = a.to(tl.float8e4nv, bitcast=True)
            b = b.to(tl.float8e4nv, bitcast=True)
            part = tl.dot(b, tl.trans(a))
        else:
            part = tl.dot(b, tl.trans(a), out_dtype=tl.int32).to(tl.float32)
        if GROUP > 0:
            part *= scale_values(tl.load(scales + groups + at // GROUP), SCALE)[:, None]
        if X_GROUP > 0:
            part *= tl.load(x_scales + x_groups + at // X_GROUP)[None, :]
        product += part
    product *= row_factors(scales, factors, own, GROUP, FORMAT, SCALE, HAS_FACTORS)[:, None]
    if X_GROUP == 0:
        product *= tl.load(x_scales + own_row)[None, :]
    store_product(product, bias, out, row, column, tokens, OUTPUTS, WHOLE, HAS_BIAS, ACTIVATION)


def rounding_of(weight: QuantizedWeight, device: Device) -> RowRounding | None:
    """The rounding of activations before they are multiplied with a weight on a device; None: none."""
    return RowRounding.of(weight) if device.arch >= FP8_ARCH else None


def multiply(
    x: RoundedRows,
    weight: QuantizedWeight,
    finish: Finish,
    out_dtype: torch.dtype,
    device: Device | None = None,
) -> Tensor:
    """x [T, inputs], rounded as the weight asks for (:func:`rounding_of`) -> [T, outputs], or half as many
    where a gate follows, of ``out_dtype``. ``device``: what tiles are chosen for; None: x's."""
    device = device or device_of(x.codes.device)
    outputs, inputs = weight.shape
    check_operands(x.codes, inputs, finish)
    operand = WeightOperand.of(weight, device.arch)
    x_groups = x.scales.shape[1]
    x_group = inputs // x_groups if x_groups > 1 else 0
    shape = ProductShape(outputs, inputs, operand.group, x.codes.dtype, device)
    rows = shape.rows(len(x.codes))
    if rows > MOST_FEW and takes_torch(x, weight, out_dtype):
        return _multiply_by_torch(x, weight, finish)
    tiling, depth, span = shape.tiling(rows), shape.depth(rows), shape.span(rows)
    for name, group in (("weights", operand.group), ("activations", x_group)):
        if group and (group % depth or depth < LEAST_DEPTH):
            raise ValueError(f"groups of {name} are of {group}; allowed: multiples of {LEAST_DEPTH}")
    codes, scales, _, factors = operand.tensors
    tokens = len(x.codes)
    target = ProductTarget.of(tokens, outputs, finish, out_dtype, codes.device, -(-inputs // span), rows)
    constants = {name: value for name, value in operand.constants.items() if name != "HAS_ZEROS"}
    if tokens:
        _multiply_rounded[target.grid(tiling)](
            x.codes if operand.format == "int8" else x.codes.view(torch.uint8),
            x.scales,
            codes,
            scales,
            factors,
            codes if finish.bias is None else finish.bias,
            target.product,
            tokens,
            row_stride(x.codes),
            INPUTS=inputs,
            OUTPUTS=outputs,
            SPAN=span,
            X_GROUP=x_group,
            **constants,
            **target.constants,
            ROWS=rows,
            COLUMNS=tiling.tile,
            DEPTH=depth,
            GROUPED=TILES_OF_A_GROUP,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            enable_fp_fusion=True,
        )
    return target.finished()


def takes_torch(x: RoundedRows, weight: QuantizedWeight, out_dtype: torch.dtype) -> bool:
    """Whether torch has a kernel: of fp8 with a scale for each row, for bfloat16."""
    whole_rows = x.scales.shape[1] == weight.scales.shape[-1] == 1
    sizes = not any(size % TORCH_SIZES for size in weight.shape)
    return weight.format == "fp8" and whole_rows and sizes and out_dtype == torch.bfloat16


def _multiply_by_torch(x: RoundedRows, weight: QuantizedWeight, finish: Finish) -> Tensor:
    scales = weight.scales.float() if weight.factors is None else weight.scales * weight.factors[:, None]
    product = torch._scaled_mm(
        x.codes,
        weight.codes.t(),
        scale_a=x.scales,
        scale_b=scales.t(),
        bias=None if finish.bias is None else finish.bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
    )
    if finish.activation is None:
        return product
    return (gated_product if finish.gated else activated)(product, finish.activation)
