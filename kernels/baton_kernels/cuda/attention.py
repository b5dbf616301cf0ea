"""One step's attention on CUDA tensors: decode plans for each window, of decoding rows and of short chunks,
and a prefill plan for all other chunks.

The pool's device must be the calling thread's current one: kernels are launched there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton_kernels.cuda.decode import DecodePlan, ShortChunks, decode_attention
from baton_kernels.cuda.kv_codes import device_view
from baton_kernels.cuda.prefill import PrefillPlan, prefill_attention
from baton_kernels.cuda.rotary import rotate_and_store
from baton_kernels.cuda.rows import write_kv
from baton_kernels.cuda.shapes import Device, Shape
from baton_kernels.kv_fp8 import UNSCALED, KVScales
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.rotary import HeadNorm
from baton_kernels.window import Window

PROGRAMS_PER_PROCESSOR = 2
"""Programs for each multiprocessor: while one waits for its first keys, the other computes."""

NONE: Mapping[Window | None, DecodePlan] = {}


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """One step's reads and writes of the pool, the same for all layers."""

    shape: Shape
    batch: PagedBatch
    decode: Mapping[Window | None, DecodePlan]
    """The plans of the decoding rows by window; empty without decoding rows."""
    short: Mapping[Window | None, DecodePlan]
    """The plans of the chunks of a few queries by window; empty without such chunks."""
    prefill: PrefillPlan | None
    """The plan of the other chunks; None without such chunks."""

    @classmethod
    def build(
        cls,
        batch: PagedBatch,
        pool: Tensor,
        windows: Collection[Window | None],
        heads: int,
        device: Device | None = None,
    ) -> CudaPlan:
        """Plans a step. ``heads``: query heads. ``device``: the device to plan for; None: the pool's.

        Decoding rows are planned on the device; chunks are described by the host. Nothing waits for the
        device.
        """
        device = device or Device.of(pool.device)
        shape = Shape.of(pool, device)
        kv_heads, programs = pool.shape[1], PROGRAMS_PER_PROCESSOR * device.processors
        planner = _Planner(shape, pool.device, heads // kv_heads, kv_heads, programs)
        chunks = planner.chunks(batch.chunks, windows)
        return cls(shape, batch, planner.decode(batch, windows), *chunks)

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, scales: KVScales = UNSCALED) -> None:
        write_kv(device_view(pool, self.shape.arch), layer, k, v, self.batch, scales)

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
        pool = device_view(pool, self.shape.arch)
        return rotate_and_store(pool, layer, qkv, cos, sin, norm, self.batch, scales)

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
        if q.stride(-1) != 1:
            raise ValueError(f"each query must be contiguous, not strided by {q.stride(-1)}")
        if sinks is not None:
            _check_sinks(sinks, q.shape[1])
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        pool, scale = device_view(pool, self.shape.arch), scale * scales.k
        for plans in (self.decode, self.short):
            if plans:
                decode_attention(
                    pool, layer, q, out, plans[window], self.shape, scale, softcap, sinks, scales.v
                )
        if self.prefill is not None:
            prefill_attention(
                pool, layer, q, out, self.prefill, self.shape, scale, window, softcap, sinks, scales.v
            )
        return out


@dataclass(frozen=True, slots=True)
class _Planner:
    """Makes the plans of one step."""

    shape: Shape
    device: torch.device
    group: int
    """Query heads for each KV head."""
    kv_heads: int
    programs: int
    """Programs that the device has room for."""

    @property
    def programs_per_head(self) -> int:
        return max(1, self.programs // self.kv_heads)

    def decode(
        self, batch: PagedBatch, windows: Collection[Window | None]
    ) -> Mapping[Window | None, DecodePlan]:
        """The plans of the decoding rows, by window."""
        if not batch.num_decode:
            return NONE
        place = (batch.decode_tables, batch.decode_contexts)
        tile, programs = self.shape.decode_tile, self.programs_per_head
        return {w: DecodePlan.build(*place, w, tile, programs, self.kv_heads) for w in windows}

    def chunks(
        self, chunks: Sequence[Chunk], windows: Collection[Window | None]
    ) -> tuple[Mapping[Window | None, DecodePlan], PrefillPlan | None]:
        """The plans of the chunks whose rows stand in one tile of decode, by window, and that of the others.

        What the host knows of them goes to the device in one copy.
        """
        if not chunks:
            return NONE, None
        begins = accumulate((chunk.table.numel() for chunk in chunks[:-1]), initial=0)
        placed = list(zip(chunks, begins, strict=True))
        most = self.shape.most_rows // self.group
        few = [(chunk, begin) for chunk, begin in placed if chunk.length <= most]
        many = [(chunk, begin) for chunk, begin in placed if chunk.length > most]
        short = ShortChunks.of(few, self.group, self.shape.decode_tile, windows) if few else None
        numbers = (short.numbers if short else [], PrefillPlan.numbers(many) if many else [])
        described = _on_device(numbers[0] + numbers[1], self.device).split_with_sizes([*map(len, numbers)])
        tables = chunks[0].table if len(chunks) == 1 else torch.cat([chunk.table for chunk in chunks])
        plans = (
            NONE
            if short is None
            else short.plans(described[0], tables, self.programs_per_head, self.kv_heads)
        )
        if not many:
            return plans, None
        tiling = self.shape.prefill(self.group)
        sizes = (tiling, self.group, self.kv_heads, self.programs, self.shape.splits_prefill)
        return plans, PrefillPlan.build([chunk for chunk, _ in many], described[1], tables, *sizes)


def _check_sinks(sinks: Tensor, heads: int) -> None:
    """ValueError unless they are what the kernels read."""
    if sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
        raise ValueError(
            f"sinks are {tuple(sinks.shape)} {sinks.dtype}; allowed: contiguous ({heads},) float32"
        )


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """``numbers`` as int32 on ``device``, in a copy that nobody waits for."""
    on_cuda = device.type == "cuda"
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=on_cuda).to(device, non_blocking=on_cuda)
