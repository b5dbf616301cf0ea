"""FP8 keys and values whose scales are found as they are stored: of K and of V, by block, head and layer.

The codes of a block's K, and of its V, of one head have their scale behind them, a float32 that is a power of
two. It begins as the least one that makes the block's first token codes, and is widened when a later token
needs it: the codes of the others are rounded again, which loses nothing but what is below the smallest code.
Tokens are stored one after the other, so what is stored does not depend on how many come in a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.kv_fp8 import FP8, to_codes

SCALE_BYTES = 4
"""The size of a scale."""
_LEAST = 2.0**-100


def scaled_view(pool: Tensor, shape: tuple[int, ...]) -> Tensor:
    """pool [num_pages, bytes of a page] of FP8 -> its codes, as blocks of ``shape`` [pages, heads, layers, 2,
    block_size, dim] between whose vectors lie the scales."""
    _, heads, layers, vectors, block_size, dim = shape
    vector = block_size * dim + SCALE_BYTES
    strides = (pool.stride(0), layers * vectors * vector, vectors * vector, vector, dim, 1)
    return pool.as_strided((len(pool), heads, *shape[2:]), strides)


def has_scales(pool: Tensor) -> bool:
    """Whether a pool of blocks, [num_blocks, kv_heads, layers, 2, block_size, head_dim], is a
    :func:`scaled_view`."""
    return pool.dtype == FP8 and pool.stride(3) == pool.shape[4] * pool.shape[5] + SCALE_BYTES


def scales_of(pool: Tensor) -> Tensor:
    """The scales of a :func:`scaled_view`, in place: [num_blocks, kv_heads, layers, 2] float32."""
    behind = pool.shape[4] * pool.shape[5]
    cells = pool.view(torch.uint8).as_strided((*pool.shape[:4], SCALE_BYTES), (*pool.stride()[:4], 1), behind)
    return cells.view(torch.float32)[..., 0]


def least_scales(x: Tensor) -> Tensor:
    """The least power of two by which each vector of x [..., dim] can be divided to be codes: float32
    [...]."""
    most = x.float().abs().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max).amax(-1)
    part, exponent = most.frexp()
    return torch.exp2((exponent - torch.where(part <= 0.875, 9, 8)).float()).clamp(min=_LEAST)


def store_scaled(pool: Tensor, layer: int, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Store k and v, both [T, kv_heads, head_dim], at these slots of a :func:`scaled_view`, in plain torch.
    ``blocks`` and ``offsets`` [T] int64: those of one block ascend."""
    vectors = torch.stack((k, v), dim=2).float()
    needed = least_scales(vectors)
    cells, scales = pool.view(torch.uint8), scales_of(pool)
    for offset in sorted(set(offsets.tolist())):
        rows = (offsets == offset).nonzero()[:, 0]
        at = blocks[rows]
        before = scales[at, :, layer] if offset else torch.zeros_like(needed[rows])
        wider = torch.maximum(before, needed[rows])
        if offset:
            held = cells[at, :, layer].view(FP8)
            again = to_codes(held, (before / wider)[..., None, None])
            cells[at, :, layer] = again.view(torch.uint8)
        scales[at, :, layer] = wider
        codes = to_codes(vectors[rows], 1 / wider[..., None])
        cells[at, :, layer, :, offset] = codes.view(torch.uint8)
