"""One step's attention by the CPU's kernels, which read and write the pool's pages in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

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
    threads: int

    @classmethod
    def build(cls, batch: PagedBatch, pool: Tensor) -> CpuPlan | None:
        """The plan of a step; None if plain torch has to compute it: see :meth:`takes`."""
        kernels = native()
        if kernels is None or not cls.takes(pool.dtype, pool.shape[-1]):
            return None
        shape = (ctypes.c_int64 * 8)(*pool.shape, pool.stride(0), has_scales(pool))
        return cls(kernels, batch, batch.row_tables, shape, pool.dtype == FP8, torch.get_num_threads())

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
        q = q.contiguous()
        if out is None:
            out = torch.empty_like(q)
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
