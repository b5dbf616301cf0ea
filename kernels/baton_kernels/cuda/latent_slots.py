"""Latents on their way into the pool and out of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.paged import Chunk, PagedBatch

NUMBERS = 4096
"""Numbers that a program copies out of the pool."""


@bound
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["pages", "offsets"])
def _store_latents(
    pool: tl.tensor,
    latents: tl.tensor,
    pages: tl.tensor,
    offsets: tl.tensor,
    layer: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    WIDTH: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIMS)
    real = dims < WIDTH
    slot = tl.load(pages + token) * block_stride + tl.load(offsets + token) * WIDTH
    slot += layer.to(tl.int64) * layer_stride
    tl.store(pool + slot + dims, tl.load(latents + token * row_stride + dims, mask=real), mask=real)


@bound
@triton.jit(do_not_specialize=["layer", "context"], do_not_specialize_on_alignment=["table"])
def _gather_latents(
    pool: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    layer: tl.tensor,
    context: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, DIMS)[None, :]
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < context, other=0)
    slots = layer.to(tl.int64) * layer_stride + blocks * block_stride + tokens % BLOCK_SIZE * WIDTH
    real = (tokens < context)[:, None] & (dims < WIDTH)
    latents = tl.load(pool + slots[:, None] + dims, mask=real)
    tl.store(out + tokens.to(tl.int64)[:, None] * WIDTH + dims, latents, mask=real)


def store_latents(view: Tensor, layer: int, latents: Tensor, batch: PagedBatch) -> None:
    """Puts latents [T, width] into the slots of the step's tokens."""
    tokens, width = latents.shape
    if tokens == 0:
        return
    if latents.stride(1) != 1:
        raise ValueError(f"a latent must be contiguous, not strided by {latents.stride(1)}")
    dims = max(16, next_power_of_two(width))
    _store_latents[(tokens,)](
        view,
        latents,
        batch.slot_blocks,
        batch.slot_offsets,
        layer,
        latents.stride(0),
        view.stride(0),
        view.stride(2),
        WIDTH=width,
        DIMS=dims,
        num_warps=2,
        enable_fp_fusion=True,
    )


def gather_latents(view: Tensor, layer: int, chunk: Chunk) -> Tensor:
    """The latents [context, width] that a chunk's last row sees."""
    block_size, width = view.shape[-2:]
    dims = max(16, next_power_of_two(width))
    tokens = max(1, NUMBERS // dims)
    out = torch.empty((chunk.context, width), dtype=view.dtype, device=view.device)
    _gather_latents[(triton.cdiv(chunk.context, tokens),)](
        view,
        out,
        chunk.table,
        layer,
        chunk.context,
        view.stride(0),
        view.stride(2),
        WIDTH=width,
        BLOCK_SIZE=block_size,
        TOKENS=tokens,
        DIMS=dims,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
