"""One step's attention on CUDA tensors: a decode plan for each window, a prefill plan for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.cuda.decode import DecodePlan, decode_attention
from baton_kernels.cuda.prefill import PrefillPlan, prefill_attention
from baton_kernels.cuda.rotary import rotate_and_store
from baton_kernels.cuda.rows import write_kv
from baton_kernels.cuda.shapes import Device, Shape
from baton_kernels.paged import PagedBatch
from baton_kernels.rotary import HeadNorm

PROGRAMS_PER_PROCESSOR = 2
"""Decoding programs for each multiprocessor: while one waits for its first keys, the other computes."""


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """One step's reads and writes of the pool, the same for all layers."""

    shape: Shape
    batch: PagedBatch
    decode: Mapping[int | None, DecodePlan]
    """By window; empty without decoding rows."""
    prefill: PrefillPlan | None
    """None without chunks."""

    @classmethod
    def build(
        cls,
        batch: PagedBatch,
        pool: Tensor,
        windows: Collection[int | None],
        device: Device | None = None,
    ) -> CudaPlan:
        """``device``: what to plan for; None: the pool's.

        Decoding rows are planned on the device and nothing waits for it; chunks are described by the host.
        """
        device = device or Device.of(pool.device)
        shape = Shape.of(pool, device)
        programs = max(1, PROGRAMS_PER_PROCESSOR * device.processors // pool.shape[1])
        tables, contexts = batch.decode_tables, batch.decode_contexts
        planned = windows if batch.num_decode else ()
        return cls(
            shape=shape,
            batch=batch,
            decode={w: DecodePlan.build(tables, contexts, w, shape.decode_tile, programs) for w in planned},
            prefill=PrefillPlan.build(batch.chunks, pool.device) if batch.chunks else None,
        )

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor) -> None:
        with torch.cuda.device(pool.get_device()):  # triton launches on the current device
            write_kv(pool, layer, k, v, self.batch)

    def rotate_and_store(
        self,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        norm: HeadNorm | None,
    ) -> Tensor:
        with torch.cuda.device(pool.get_device()):
            return rotate_and_store(pool, layer, qkv, cos, sin, norm, self.batch)

    def attend(
        self,
        pool: Tensor,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if q.stride(-1) != 1:
            raise ValueError(f"each query must be contiguous, not strided by {q.stride(-1)}")
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        count = self.batch.num_decode
        with torch.cuda.device(pool.get_device()):  # triton launches on the current device
            if count:
                plan = self.decode[window]
                decode_attention(pool, layer, q[:count], out, plan, self.shape, scale, softcap)
            if self.prefill is not None:
                prefill_attention(pool, layer, q, out, self.prefill, self.shape, scale, window, softcap)
        return out
