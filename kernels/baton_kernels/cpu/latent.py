"""One step's latent attention by the CPU's kernels, which read the pool's pages in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.checks import check_batch, check_rows, check_shape
from baton_kernels.cpu.library import KINDS, Native, native, pointer
from baton_kernels.cpu.rows import NativeNorm, takes
from baton_kernels.latent_norms import LatentNorms
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.plain_latent import PlainLatentPlan

WIDTH = 32
"""A latent's numbers are whole runs of so many: two vectors."""


@dataclass(frozen=True, slots=True)
class CpuLatentPlan:
    """One step's reads and writes of a pool of latents, the same for all layers."""

    kernels: Native
    plain: PlainLatentPlan
    tables: Tensor
    """[R, blocks] int64: the block table of each absorbed row."""
    contexts: Tensor
    """[R] int64: the tokens that it sees."""
    shape: ctypes.Array[ctypes.c_int64]
    """Layers, block_size and width."""
    view: torch.Size
    """The pool's shape."""
    dtype: torch.dtype
    """The pool's type, and the activations'."""
    threads: int

    @classmethod
    def build(cls, batch: PagedBatch, absorbed: PagedBatch, view: Tensor) -> CpuLatentPlan | None:
        """The plan of a step; None if plain torch has to compute it: see :meth:`takes`. ValueError for a step
        that names what the pool has not."""
        kernels = native()
        if kernels is None or not cls.takes(view.dtype, view.shape[-1]):
            return None
        if view.dim() != 6 or view.shape[1] != 1 or view.shape[3] != 1 or not view.is_contiguous():
            raise ValueError(
                f"a pool of latents is {tuple(view.shape)}; allowed: [blocks, 1, layers, 1, ...]"
            )
        check_batch(batch, len(view), view.shape[4])
        check_rows(batch.row_tables, batch.decode_contexts, batch.num_decode, len(view), view.shape[4])
        shape = (ctypes.c_int64 * 3)(view.shape[2], *view.shape[4:])
        plain = PlainLatentPlan.build(batch, absorbed, view)
        tables, contexts = _rows(absorbed, plain.tables)
        check_rows(tables, contexts, len(contexts), len(view), view.shape[4])
        return cls(
            kernels, plain, tables, contexts, shape, view.shape, view.dtype, threads=torch.get_num_threads()
        )

    @staticmethod
    def takes(dtype: torch.dtype, width: int) -> bool:
        """Whether the kernels support such latents."""
        return dtype in KINDS and width % WIDTH == 0

    @property
    def batch(self) -> PagedBatch:
        """The whole step."""
        return self.plain.batch

    def check_layer(self, view: Tensor, layer: int, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Check the pool and layer of a call, and the shape of what it is given. ValueError if the kernels
        would misread them."""
        if view.shape != self.view or view.dtype != self.dtype or not 0 <= layer < self.view[2]:
            raise ValueError(
                f"layer {layer} of a pool {tuple(view.shape)} {view.dtype}; planned: {tuple(self.view)} "
                f"{self.dtype}"
            )
        check_shape("what latents are made of or read by", tensor, shape, self.dtype)

    def store(self, view: Tensor, layer: int, latents: Tensor) -> None:
        self.plain.store(view, layer, latents)

    def store_normed(
        self, view: Tensor, layer: int, down: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor
    ) -> Tensor:
        if not takes(norms.kv, down.dtype) or not takes(norms.q, down.dtype):
            return self.plain.store_normed(view, layer, down, norms, cos, sin)
        tokens, rope_dim = len(self.batch.slot_blocks), self.view[5] - norms.kv_rank
        self.check_layer(view, layer, down, (tokens, norms.q_rank + self.view[5]))
        for angles in (cos, sin):
            check_shape("the angles", angles, (tokens, 1, rope_dim), torch.float32)
        down, cos, sin = down.contiguous(), cos.contiguous(), sin.contiguous()
        q = torch.empty((len(down), norms.q_rank), dtype=down.dtype)
        both = (NativeNorm * 2)(NativeNorm.of(norms.q), NativeNorm.of(norms.kv))
        self.kernels.store_latents(
            KINDS[down.dtype],
            view.data_ptr(),
            self.shape,
            layer,
            down.data_ptr(),
            q.data_ptr(),
            both,
            cos.data_ptr(),
            sin.data_ptr(),
            self.batch.slot_blocks.data_ptr(),
            self.batch.slot_offsets.data_ptr(),
            len(down),
            norms.q_rank,
            norms.kv_rank,
            cos.shape[-1],
            self.threads,
        )
        return q

    def absorb(self, q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, factors: Tensor | None) -> Tensor:
        if up.shape[2] % WIDTH or not up.is_contiguous():
            return self.plain.absorb(q, up, cos, sin, factors)
        rows, heads, dim = q.shape
        rope_dim, rank = cos.shape[-1], up.shape[2]
        made = up.shape[1] - dim + rope_dim
        if (
            up.shape[0] != heads
            or up.dtype != q.dtype
            or q.dtype != self.dtype
            or min(made, dim - rope_dim) < 0
        ):
            raise ValueError(f"queries {tuple(q.shape)} {q.dtype} by weights {tuple(up.shape)} {up.dtype}")
        for angles in (cos, sin):
            check_shape("the angles", angles, (rows, 1, rope_dim), torch.float32)
        q, cos, sin = q.contiguous(), cos.contiguous(), sin.contiguous()
        factors = None if factors is None else factors.float().contiguous()
        wide = torch.empty((rows, heads, rank + rope_dim), dtype=q.dtype)
        self.kernels.absorb(
            KINDS[q.dtype],
            q.data_ptr(),
            up.data_ptr(),
            wide.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            pointer(factors),
            rows,
            heads,
            dim - rope_dim,
            rope_dim,
            up.shape[1] - dim + rope_dim,
            rank,
            self.threads,
        )
        return wide

    def make_values(self, sums: Tensor, up: Tensor, value_dim: int) -> Tensor:
        if up.shape[2] % WIDTH or not up.is_contiguous():
            return self.plain.make_values(sums, up, value_dim)
        sums, (rows, heads, rank) = sums.contiguous(), sums.shape
        if up.shape[0] != heads or up.shape[2] != rank or up.dtype != sums.dtype or up.shape[1] < value_dim:
            raise ValueError(f"sums {tuple(sums.shape)} {sums.dtype} by weights {tuple(up.shape)} {up.dtype}")
        out = torch.empty((rows, heads, value_dim), dtype=sums.dtype)
        self.kernels.make_values(
            KINDS[sums.dtype],
            sums.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            up.shape[1] - value_dim,
            value_dim,
            rank,
            self.threads,
        )
        return out

    def attend(self, view: Tensor, layer: int, q: Tensor, *, scale: float, value_dim: int) -> Tensor:
        q, (rows, heads, _) = q.contiguous(), q.shape
        self.check_layer(view, layer, q, (len(self.tables), heads, self.view[5]))
        if not 0 < value_dim <= self.view[5]:
            raise ValueError(f"value_dim is {value_dim}; allowed: 1 to {self.view[5]}")
        out = torch.empty((rows, heads, value_dim), dtype=q.dtype)
        self.kernels.attend_latents(
            KINDS[q.dtype],
            view.data_ptr(),
            self.shape,
            layer,
            q.data_ptr(),
            out.data_ptr(),
            self.tables.data_ptr(),
            self.contexts.data_ptr(),
            rows,
            heads,
            value_dim,
            self.tables.shape[1],
            scale,
            self.threads,
        )
        return out

    def gather(self, view: Tensor, layer: int, chunk: Chunk) -> Tensor:
        return self.plain.gather(view, layer, chunk)

    def attend_expanded(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        length, heads, dim = q.shape
        if not CpuPlan.takes(q.dtype, dim) or v.shape[2] > dim:
            return self.plain.attend_expanded(q, k, v, scale=scale)
        # A pool of one block, in which values are as long as keys.
        pool = torch.stack((k, pad(v, (0, dim - v.shape[2])))).permute(2, 0, 1, 3).contiguous()
        q, table, out = q.contiguous(), torch.zeros(1, dtype=torch.int64), torch.empty_like(q)
        self.kernels.prefill(
            KINDS[q.dtype],
            False,  # no codes
            pool.data_ptr(),
            (ctypes.c_int64 * 8)(1, heads, 1, 2, len(k), dim, 2 * heads * len(k) * dim, 0),
            0,
            q.data_ptr(),
            out.data_ptr(),
            table.data_ptr(),
            length,
            len(k),
            heads,
            scale,
            1.0,
            0.0,
            0,
            None,
            self.threads,
        )
        return out[..., : v.shape[2]]


def _rows(absorbed: PagedBatch, tables: Tensor) -> tuple[Tensor, Tensor]:
    """The table, [R, blocks] padded with 0, and the context of each row: those of a chunk see its table."""
    decode = absorbed.num_decode
    blocks = max([tables.shape[1], *(len(chunk.table) for chunk in absorbed.chunks)])
    total = decode + sum(chunk.length for chunk in absorbed.chunks)
    whole = torch.zeros((total, blocks), dtype=torch.int64)
    contexts = torch.empty(total, dtype=torch.int64)
    whole[:decode, : tables.shape[1]] = tables
    contexts[:decode] = absorbed.decode_contexts
    for chunk in absorbed.chunks:
        rows = slice(chunk.start, chunk.start + chunk.length)
        whole[rows, : len(chunk.table)] = chunk.table
        contexts[rows] = torch.arange(chunk.context - chunk.length + 1, chunk.context + 1)
    return whole, contexts
