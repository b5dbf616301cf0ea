"""The parts that kernels of products share: which tile a program has, and what follows a product.

With few rows the inputs are split among programs, and a second kernel adds their sums in order, with what
follows: the bias, the activation, the gate. With more, the kernel of the product does all of that but the
gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.activation_kind import GATED, UNGATED, Activation
from baton_kernels.cuda.activation import active, gated
from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.quantized_shapes import MOST_FEW
from baton_kernels.cuda.rows import gated_product
from baton_kernels.cuda.tuned import Tiling

TILES_OF_A_GROUP = 8
"""Tiles of rows that are multiplied by the same outputs one after the other: the weights of these are in the
second-level cache meanwhile."""
JOINED = 512
"""Outputs of a program of ``_join``."""


@triton.jit
def tile_of_program(
    tokens: tl.tensor, ROWS: tl.constexpr, COLUMN_TILES: tl.constexpr, GROUPED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The tile of rows and the tile of outputs of this program."""
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, ROWS)
    first = program // (GROUPED * COLUMN_TILES) * GROUPED
    within = program % (GROUPED * COLUMN_TILES)
    size = tl.minimum(tiles - first, GROUPED)
    return first + within % size, within // size


@triton.jit
def store_product(
    product: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """Stores a tile [COLUMNS, ROWS] of the product: if WHOLE the result, or else the sums of a part of the
    inputs."""
    real = column < OUTPUTS
    if WHOLE:
        if HAS_BIAS:
            product += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            product = active(product, ACTIVATION)
    else:
        out += tl.program_id(1).to(tl.int64) * tokens * OUTPUTS
    places = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    stored = (row < tokens)[:, None] & real[None, :]
    tl.store(places, tl.trans(product).to(out.dtype.element_ty), mask=stored)


@bound
@triton.jit(do_not_specialize=["tokens", "parts"], do_not_specialize_on_alignment=["bias"])
def _join(
    sums: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    number: tl.tensor,
    tokens: tl.tensor,
    parts: tl.tensor,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    size: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    real = column < size
    total = tl.zeros([COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS], tl.float32)
    for part in range(parts):
        places = sums + (part * tokens.to(tl.int64) + row) * OUTPUTS + column
        total += tl.load(places, mask=real, other=0.0)
        if GATED:
            up += tl.load(places + size, mask=real, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + size + column, mask=real, other=0.0).to(tl.float32)
    if GATED:
        total = gated(total, up, number, ACTIVATION)
    elif ACTIVATION is not None:
        total = active(total, ACTIVATION)
    tl.store(out + row * size + column, total.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class Finish:
    """What follows a product."""

    bias: Tensor | None = None
    """[outputs]."""
    gated: bool = False
    """Whether the result is the activated first half of the outputs times the second."""
    activation: Activation | None = None
    """None: none, and no gate."""

    def __post_init__(self) -> None:
        if self.gated and self.activation is None:
            raise ValueError("activation is None; allowed for gated projections: an Activation")
        if self.kind in GATED and not self.gated:
            raise ValueError(f"activation is {self.kind}; allowed without a gate: {', '.join(UNGATED)}")

    @property
    def kind(self) -> str | None:
        return None if self.activation is None else self.activation.kind

    def size(self, outputs: int) -> int:
        """The results of a row with so many outputs."""
        return outputs // 2 if self.gated else outputs


def row_stride(x: Tensor) -> int:
    """The numbers from row to row: of one row torch may say anything."""
    return x.stride(0) if len(x) > 1 else x.shape[1]


def check_operands(x: Tensor, inputs: int, finish: Finish) -> None:
    """ValueError if x or the bias is not as the kernels read it."""
    if x.shape[1] != inputs:
        raise ValueError(f"x has rows of {x.shape[1]}; allowed for this weight: {inputs}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"rows of x must be contiguous, not strided by {x.stride(1)}")
    if finish.bias is not None and not finish.bias.is_contiguous():
        raise ValueError(f"the bias must be contiguous, not {finish.bias.stride()} apart")


@dataclass(frozen=True, slots=True)
class ProductTarget:
    """Memory for a product and for what follows it."""

    tokens: int
    outputs: int
    finish: Finish
    product: Tensor
    """[parts, T, outputs] float32, or [T, outputs] of the type of the result where WHOLE."""
    out: Tensor
    """The result; the product itself where nothing is left to do."""
    parts: int
    """The parts of the inputs; 0: the kernel of the product finishes it."""

    @classmethod
    def of(
        cls,
        tokens: int,
        outputs: int,
        finish: Finish,
        dtype: torch.dtype,
        device: torch.device,
        parts: int,
        rows: int,
    ) -> ProductTarget:
        """``rows``: those of a tile."""
        if rows <= MOST_FEW:
            product = torch.empty((parts, tokens, outputs), dtype=torch.float32, device=device)
            out = torch.empty((tokens, finish.size(outputs)), dtype=dtype, device=device)
            return cls(tokens, outputs, finish, product, out, parts)
        product = torch.empty((tokens, outputs), dtype=dtype, device=device)
        return cls(tokens, outputs, finish, product, product, 0)

    def grid(self, tiling: Tiling) -> tuple[int, int]:
        tiles = triton.cdiv(self.tokens, tiling.rows) * triton.cdiv(self.outputs, tiling.tile)
        return tiles, max(1, self.parts)

    @property
    def constants(self) -> dict[str, object]:
        """What the kernel of the product is compiled for."""
        whole = not self.parts
        return {
            "WHOLE": whole,
            "HAS_BIAS": whole and self.finish.bias is not None,
            "ACTIVATION": self.finish.kind if whole and not self.finish.gated else None,
        }

    def finished(self) -> Tensor:
        """The result, once the product is launched."""
        finish, activation = self.finish, self.finish.activation
        if not self.parts:
            return gated_product(self.out, activation) if finish.gated and activation else self.out
        if self.tokens:
            _join[(self.tokens, triton.cdiv(self.out.shape[1], JOINED))](
                self.product,
                self.product if finish.bias is None else finish.bias,
                self.out,
                0.0 if activation is None else activation.number,
                self.tokens,
                self.parts,
                OUTPUTS=self.outputs,
                HAS_BIAS=finish.bias is not None,
                GATED=finish.gated,
                ACTIVATION=finish.kind,
                COLUMNS=JOINED,
                num_warps=4,
                enable_fp_fusion=True,
            )
        return self.out
