"""One step's attention by the CPU's kernels, which read and write the pool's pages in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.cpu.checks import check_batch, check_rows, check_shape
from baton_kernels.cpu.library import KINDS, Native, native, pointer
from baton_kernels.kv_fp8 import FP8, UNSCALED, KVScales, as_stored, in_place
from baton_kernels.kv_scaled import has_scales, store_scaled
from baton_kernels.paged import PagedBatch
from baton_kernels.rotary import HeadNorm
from baton_kernels.window import ChunkedWindow, Window

VECTOR_BYTES = 64
MAX_VECTORS = 16


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """One step's reads and writes of the pool, the same for all layers."""

    kernels: Native
    batch: PagedBatch
    tables: Tensor
    """[num_decode, blocks] int64: the block table of each decode row."""
    shape: ctypes.Array[ctypes.c_int64]
    """The pool's, the numbers of a block, and whether it has a scale for each head and block."""
    codes: bool
    """Whether the pool is of FP8."""
    view: torch.Size
    """The pool's shape."""
    threads: int

    @classmethod
    def build(cls, batch: PagedBatch, pool: Tensor) -> CpuPlan | None:
        """The plan of a step; None if plain torch has to compute it: see :meth:`takes`. ValueError for a step
        that names what the pool has not."""
        kernels = native()
        if kernels is None or not cls.takes(pool.dtype, pool.shape[-1]):
            return None
        if pool.dim() != 6 or pool.shape[3] != 2:
            raise ValueError(
                f"a pool of K and V is {tuple(pool.shape)}; allowed: [blocks, heads, layers, 2, ...]"
            )
        num_blocks, block_size, tables = len(pool), pool.shape[4], batch.row_tables
        check_batch(batch, num_blocks, block_size)
        check_rows(tables, batch.decode_contexts, batch.num_decode, num_blocks, block_size)
        shape = (ctypes.c_int64 * 8)(*pool.shape, pool.stride(0), has_scales(pool))
        return cls(
            kernels, batch, tables, shape, pool.dtype == FP8, pool.shape, threads=torch.get_num_threads()
        )

    def check_layer(self, pool: Tensor, layer: int, tensor: Tensor, heads: int) -> None:
        """Check the pool and layer of a call, and its heads [T, heads, head_dim]: ``heads`` of queries, and
        those of K and V unless the tensor has no more. ValueError if the kernels would misread them."""
        view, (tokens, all_heads, dim) = self.view, tensor.shape
        kind = tensor.dtype in KINDS and (self.codes or pool.dtype == tensor.dtype)
        fits = heads > 0 and heads % view[1] == 0 and all_heads in (heads, heads + 2 * view[1])
        known = pool.shape == view and (pool.dtype == FP8) == self.codes and 0 <= layer < view[2]
        if not (kind and fits and known and dim == view[5] and tokens == len(self.batch.slot_blocks)):
            raise ValueError(
                f"layer {layer} has heads {tuple(tensor.shape)} {tensor.dtype} over a pool "
                f"{tuple(pool.shape)} {pool.dtype}; planned: {len(self.batch.slot_blocks)} tokens over "
                f"{tuple(view)}"
            )

    @classmethod
    def takes(cls, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernels support such heads of a pool: a head must be whole vectors, 16 at most, of the
        queries' type. Queries of a pool of FP8 are float32 or bfloat16."""
        if dtype == FP8:
            return cls.takes(torch.float32, head_dim) and cls.takes(torch.bfloat16, head_dim)
        size = head_dim * dtype.itemsize
        return dtype in KINDS and size % VECTOR_BYTES == 0 and size <= MAX_VECTORS * VECTOR_BYTES

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, scales: KVScales = UNSCALED) -> None:
        blocks, offsets, cells = self.batch.slot_blocks, self.batch.slot_offsets, in_place(pool)
        if has_scales(pool):
            store_scaled(pool, layer, k, v, blocks, offsets)
            return
        of_k, of_v = scales.factors
        cells[blocks, :, layer, 0, offsets] = as_stored(k, of_k, pool)
        cells[blocks, :, layer, 1, offsets] = as_stored(v, of_v, pool)

    def rotate_and_store(
        self,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        norm: HeadNorm | None,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        tokens, heads, dim = qkv.shape[0], qkv.shape[1] - 2 * pool.shape[1], qkv.shape[2]
        self.check_layer(pool, layer, qkv, heads)
        for angles in (cos, sin):
            check_shape("the angles", angles, (tokens, 1, dim), torch.float32)
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        q = torch.empty((tokens, heads, dim), dtype=qkv.dtype)
        self.kernels.rotate_and_store(
            KINDS[q.dtype],
            self.codes,
            pool.data_ptr(),
            self.shape,
            layer,
            qkv.data_ptr(),
            q.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            pointer(norm.q if norm else None),
            pointer(norm.k if norm else None),
            norm.eps if norm else 0.0,
            norm.offset if norm else 0.0,
            self.batch.slot_blocks.data_ptr(),
            self.batch.slot_offsets.data_ptr(),
            tokens,
            heads,
            *scales.factors,
            self.threads,
        )
        return q

    def attend(
        self,
        pool: Tensor,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        window: Window | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        scales: KVScales = UNSCALED,
        out: Tensor | None = None,
    ) -> Tensor:
        self.check_layer(pool, layer, q, q.shape[1])
        q = q.contiguous()
        if out is None:
            out = torch.empty_like(q)
        elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
            raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; allowed: {tuple(q.shape)} {q.dtype}")
        batch, heads = self.batch, q.shape[1]
        of_heads = None if sinks is None else numbers_of_heads(sinks, heads)
        number = window_number(window)
        how = (scale * scales.k, scales.v, softcap or 0.0, number, pointer(of_heads), self.threads)
        place = (KINDS[q.dtype], self.codes, pool.data_ptr(), self.shape, layer)
        if batch.num_decode:
            self.kernels.decode(
                *place,
                q.data_ptr(),
                out.data_ptr(),
                self.tables.data_ptr(),
                batch.decode_contexts.data_ptr(),
                batch.num_decode,
                heads,
                self.tables.shape[1],
                *how,
            )
        row_bytes = heads * q.shape[2] * q.itemsize
        for chunk in batch.chunks:
            offset = chunk.start * row_bytes
            self.kernels.prefill(
                *place,
                q.data_ptr() + offset,
                out.data_ptr() + offset,
                chunk.table.data_ptr(),
                chunk.length,
                chunk.context,
                heads,
                *how,
            )
        return out


def window_number(window: Window | None) -> int:
    """A window as the kernels take it: 0 for none, a chunked one below 0."""
    if isinstance(window, ChunkedWindow):
        return -window.size
    return window or 0


def numbers_of_heads(sinks: Tensor, heads: int) -> Tensor:
    """The sinks as the kernels read them. ValueError if they would misread them."""
    if sinks.dtype != torch.float32 or sinks.shape != (heads,):
        raise ValueError(f"sinks are {tuple(sinks.shape)} {sinks.dtype}; allowed: ({heads},) torch.float32")
    return sinks.contiguous()
