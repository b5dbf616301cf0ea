"""One step's latent attention on CUDA tensors: of decoding rows and absorbed chunks over the pool, and of
expanded chunks.

The pool's device must be the calling thread's current one: kernels are launched there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.cuda.latent_chunks import attend_expanded
from baton_kernels.cuda.latent_rows import AbsorbedRows, attend_absorbed
from baton_kernels.cuda.latent_shapes import LatentShape
from baton_kernels.cuda.latent_slots import gather_latents, store_latents
from baton_kernels.cuda.shapes import Device
from baton_kernels.latent_norms import LatentNorms
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.plain_latent import absorbed_queries, split_down, values_of_sums


@dataclass(frozen=True, slots=True)
class CudaLatentPlan:
    """One step's reads and writes of a pool of latents, the same for all layers."""

    shape: LatentShape
    batch: PagedBatch
    decode: AbsorbedRows | None
    """The plan of the decoding rows; None without such rows."""
    chunks: AbsorbedRows | None
    """The plan of the absorbed chunks; None without such chunks."""

    @classmethod
    def build(
        cls,
        batch: PagedBatch,
        absorbed: PagedBatch,
        view: Tensor,
        heads: int,
        device: Device | None = None,
    ) -> CudaLatentPlan:
        """Plans a step of ``batch``, of which the rows ``absorbed`` attend to latents as they are. ``heads``:
        query heads. ``device``: the device to plan for; None: the pool's.

        Decoding rows are planned on the device; chunks are described by the host. Nothing waits for the
        device.
        """
        device = device or Device.of(view.device)
        shape = LatentShape.of(view, heads, device)

        def programs(queries: int) -> int:
            return max(1, device.processors // shape.row_tiles(queries))

        decode = chunks = None
        if absorbed.num_decode:
            place = (absorbed.decode_tables, absorbed.decode_contexts)
            count = programs(absorbed.decode_queries)
            decode = AbsorbedRows.of_sequences(*place, shape.tile, count)
        if absorbed.chunks:
            queries = shape.chunk_queries
            chunks = AbsorbedRows.of_chunks(absorbed.chunks, queries, shape.tile, programs(queries))
        return cls(shape, batch, decode, chunks)

    def store(self, view: Tensor, layer: int, latents: Tensor) -> None:
        store_latents(view, layer, latents, self.batch)

    def store_normed(
        self, view: Tensor, layer: int, down: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor
    ) -> Tensor:
        q, latents = split_down(down, norms, cos, sin)
        self.store(view, layer, latents)
        return q

    def absorb(self, q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, factors: Tensor | None) -> Tensor:
        return absorbed_queries(q, up, cos, sin, factors)

    def make_values(self, sums: Tensor, up: Tensor, value_dim: int) -> Tensor:
        return values_of_sums(sums, up, value_dim)

    def attend(self, view: Tensor, layer: int, q: Tensor, *, scale: float, value_dim: int) -> Tensor:
        q = q.contiguous()
        out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
        for plan in (self.decode, self.chunks):
            if plan is not None:
                attend_absorbed(view, layer, q, out, plan, self.shape, scale)
        return out

    def gather(self, view: Tensor, layer: int, chunk: Chunk) -> Tensor:
        return gather_latents(view, layer, chunk)

    def attend_expanded(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
        attend_expanded(q, k, v, out, self.shape, scale)
        return out
