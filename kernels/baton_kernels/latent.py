"""Attention over latents (MLA): one vector of each token in the paged pool, which all heads read.

A latent holds in its first numbers what keys and values are made of, and behind them the part of the key that
is rotated. Absorbed queries, which are as wide as a latent, read the latents as they are: as keys, and their
first ``value_dim`` numbers as values. Expanded, each head has keys and values of its own, made of the
latents of a whole context.

The pool's device alone decides what computes, when a step is planned, as in ``baton_kernels.attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_kernels.cpu.latent import CpuLatentPlan
from baton_kernels.latent_norms import LatentNorms
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.plain_latent import PlainLatentPlan
from baton_kernels.step_latent import StepLatent


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The parts of a step that are the same in every layer of latents, worked out once per step.

    The decoding rows are absorbed, and the chunks but those that are ``expanded``."""

    step: StepLatent
    rows: Tensor | None
    """[R] int64: the absorbed rows of the step; None: all of them."""
    expanded: tuple[Chunk, ...]
    """The chunks whose keys and values are expanded."""

    @classmethod
    def build(
        cls,
        batch: PagedBatch,
        view: Tensor,
        heads: int,
        expands: Callable[[Chunk], bool] = lambda chunk: False,
    ) -> LatentPlan:
        """Plans a step. ``view``: the pool, [blocks, 1, layers, 1, block_size, width]. ``heads``: the query
        heads of each layer. ``expands``: whether a chunk's keys and values are expanded."""
        expanded = tuple(chunk for chunk in batch.chunks if expands(chunk))
        rows, absorbed = _absorbed(batch, expanded, view.device)
        if view.device.type == "cuda":
            from baton_kernels.cuda.latent import CudaLatentPlan  # triton is only there where CUDA is

            return cls(CudaLatentPlan.build(batch, absorbed, view, heads), rows, expanded)
        step = CpuLatentPlan.build(batch, absorbed, view) or PlainLatentPlan.build(batch, absorbed, view)
        return cls(step, rows, expanded)

    def store(self, view: Tensor, layer: int, latents: Tensor) -> None:
        """Puts the latents [T, width] of all tokens of the step into their slots."""
        self.step.store(view, layer, latents)

    def store_normed(
        self, view: Tensor, layer: int, down: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """down [T, q_rank + kv_rank + rope_dim], as the projection yields it -> the normed latents that
        queries are made of, [T, q_rank].

        The normed latents of keys and values, and behind them the part of the key that is turned by cos and
        sin, both [T, 1, rope_dim] float32 as ``baton_kernels.rotary.rotate`` takes them, go to the slots of
        all tokens of the step."""
        return self.step.store_normed(view, layer, down, norms, cos, sin)

    def absorb(self, q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, factors: Tensor | None) -> Tensor:
        """q [R, heads, nope_dim + rope_dim], not rotated -> [R, heads, kv_rank + rope_dim], as ``attend``
        takes it: the product with what makes each head's key, and the rotated part, both times the row's
        factor.

        ``up`` [heads, nope_dim + value_dim, kv_rank]: what makes keys and values of a latent. ``factors``
        [R, 1, 1] float32; None: 1."""
        return self.step.absorb(q, up, cos, sin, factors)

    def make_values(self, sums: Tensor, up: Tensor, value_dim: int) -> Tensor:
        """sums [R, heads, kv_rank], as ``attend`` yields them -> [R, heads, value_dim]: the products with
        what makes each head's value, the last ``value_dim`` rows of ``up``."""
        return self.step.make_values(sums, up, value_dim)

    def attend(self, view: Tensor, layer: int, q: Tensor, *, scale: float, value_dim: int) -> Tensor:
        """q [R, heads, width], of the absorbed rows in order -> [R, heads, value_dim]: softmax(scale q l) v
        over the latents l that each row sees, where v is the first ``value_dim`` numbers of l.

        The latents of the step's own tokens must already be in the pool."""
        return self.step.attend(view, layer, q, scale=scale, value_dim=value_dim)

    def gather(self, view: Tensor, layer: int, chunk: Chunk) -> Tensor:
        """The latents that the last row of a chunk sees, [context, width]."""
        return self.step.gather(view, layer, chunk)

    def attend_expanded(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """q [L, heads, qk_dim], k [C, heads, qk_dim], v [C, heads, v_dim] -> [L, heads, v_dim]: causal, where
        the last query sees all C tokens, the one before it one fewer, and so on."""
        return self.step.attend_expanded(q, k, v, scale=scale)


def _absorbed(
    batch: PagedBatch, expanded: tuple[Chunk, ...], device: torch.device
) -> tuple[Tensor | None, PagedBatch]:
    """The rows that are absorbed (None: all), and the batch of these alone."""
    if not expanded:
        return None, batch
    left = [chunk for chunk in batch.chunks if not any(chunk is one for one in expanded)]
    spans = [range(batch.num_decode), *(range(c.start, c.start + c.length) for c in left)]
    rows = torch.tensor([row for span in spans for row in span], dtype=torch.int64, device=device)
    chunks, start = [], batch.num_decode
    for chunk in left:
        chunks.append(replace(chunk, start=start))
        start += chunk.length
    return rows, replace(batch, chunks=tuple(chunks))
