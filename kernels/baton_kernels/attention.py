"""Attention over the paged KV pool: Triton kernels on CUDA tensors, plain torch on all others.

The pool's device alone decides, when a step is planned. What the kernels cannot do is an error then, never a
slower way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.library import advise_large_pages, native
from baton_kernels.kv_fp8 import UNSCALED, KVScales, check_scales
from baton_kernels.paged import PagedBatch
from baton_kernels.plain import PlainPlan
from baton_kernels.rotary import HeadNorm
from baton_kernels.step_attention import StepAttention
from baton_kernels.window import Window

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The parts of a step that are the same in every layer (which slots to read and write, the shares of the
    programs, masks), worked out once per step."""

    step: StepAttention

    @classmethod
    def build(
        cls, batch: PagedBatch, pool: Tensor, windows: Collection[Window | None], heads: int
    ) -> AttentionPlan:
        """Plans a step. ``windows``: the distinct windows of the model's layers (None: no window).
        ``heads``: the query heads of each layer."""
        if batch.planner is not None:
            return cls(batch.planner(batch, pool, windows, heads))
        if pool.device.type == "cpu":
            return cls(CpuPlan.build(batch, pool) or PlainPlan.build(batch, pool, windows))
        from baton_kernels.cuda.attention import CudaPlan  # triton is only there where CUDA is

        return cls(CudaPlan.build(batch, pool, windows, heads))


def new_pool(
    num_blocks: int,
    kv_heads: int,
    layers: int,
    block_size: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A pool in the layout of ``baton_kernels.paged``, zeroed: plain torch multiplies masked slots by 0. Logs
    a warning if the CPU's kernels exist and do not take its heads."""
    pool = torch.empty((num_blocks, kv_heads, layers, 2, block_size, head_dim), dtype=dtype, device=device)
    if device.type == "cpu":
        advise_large_pages(pool)
        if native() is not None and not CpuPlan.takes(dtype, head_dim):
            log.warning(
                "attention over heads of %d %s is left to plain torch, which is slower", head_dim, dtype
            )
    return pool.zero_()


def write_kv(
    pool: Tensor, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan, scales: KVScales = UNSCALED
) -> None:
    """Store the step's k and v, both [T, kv_heads, head_dim], in the slots of their tokens, in the pool's
    type."""
    check_scales(pool, scales)
    plan.step.write_kv(pool, layer, k, v, scales)


def rotate_and_store(
    pool: Tensor,
    layer: int,
    qkv: Tensor,
    plan: AttentionPlan,
    *,
    cos: Tensor,
    sin: Tensor,
    norm: HeadNorm | None = None,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """qkv [T, heads + 2 * kv_heads, head_dim], as the fused projection yields it -> q [T, heads, head_dim].

    Queries and keys are normed (unless ``norm`` is None) and turned by cos and sin, both [T, 1, head_dim]
    float32 as ``baton_kernels.rotary.rotate`` takes them; keys and values go to their tokens' slots, first
    rounded to the type of qkv and then to the pool's (``baton_kernels.kv_fp8``).
    """
    check_scales(pool, scales)
    return plan.step.rotate_and_store(pool, layer, qkv, cos=cos, sin=sin, norm=norm, scales=scales)


def paged_attention(
    pool: Tensor,
    layer: int,
    q: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: Window | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """q [T, heads, head_dim] -> [T, heads, head_dim]: softmax(scale q k) v over the tokens that each row may
    see.

    Query head h reads kv head ``h // (heads / kv_heads)``. ``window`` is one of the windows that the plan was
    built for. With a ``softcap``, each scaled score s becomes ``softcap * tanh(s / softcap)``. ``sinks``
    [heads] float32: a further score of each query head, neither scaled nor soft-capped, which takes part in
    the softmax and has no value. The K and V of the step's own tokens must already be in the pool, by the
    same ``scales``.
    """
    check_scales(pool, scales)
    return plan.step.attend(
        pool, layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks, scales=scales
    )
