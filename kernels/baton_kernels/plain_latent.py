"""Attention over latents in plain torch, for any device and float type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.latent_norms import LatentNorms
from baton_kernels.paged import Chunk, PagedBatch
from baton_kernels.rotary import rotate


@dataclass(frozen=True, slots=True)
class PlainLatentPlan:
    """One step's reads and writes of a pool of latents."""

    batch: PagedBatch
    slots: Tensor
    """[T] int64: the slot of layer 0 of each token, in the pool as [slots, width]."""
    absorbed: PagedBatch
    """The batch of the absorbed rows."""
    tables: Tensor
    """[num_decode, blocks] int64."""

    @classmethod
    def build(cls, batch: PagedBatch, absorbed: PagedBatch, view: Tensor) -> PlainLatentPlan:
        """Plans a step of ``batch``, of which the rows ``absorbed`` attend to latents as they are."""
        _, _, layers, _, block_size, _ = view.shape
        slots = batch.slot_blocks * (layers * block_size) + batch.slot_offsets
        return cls(batch, slots, absorbed, absorbed.row_tables)

    def store(self, view: Tensor, layer: int, latents: Tensor) -> None:
        block_size, width = view.shape[-2:]
        view.view(-1, width).index_copy_(0, self.slots + layer * block_size, latents)

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
        out = q.new_empty((*q.shape[:2], value_dim))
        absorbed, decode = self.absorbed, self.absorbed.num_decode
        if decode:
            latents = _latents(view, layer, self.tables)
            keys = torch.arange(latents.shape[1], device=latents.device)
            seen = keys < absorbed.decode_contexts[:, None]
            # Slots that are not seen may hold anything, and nothing times NaN is NaN.
            latents = latents.masked_fill(~seen[..., None], 0)
            out[:decode] = _weighed(q[:decode], latents, seen[:, None], scale, value_dim)
        for chunk in absorbed.chunks:
            rows = slice(chunk.start, chunk.start + chunk.length)
            seen = _causal(chunk.length, chunk.context, q.device)
            queries, latents = q[rows].transpose(0, 1), self.gather(view, layer, chunk)
            out[rows] = _weighed(queries, latents, seen, scale, value_dim).transpose(0, 1)
        return out

    def gather(self, view: Tensor, layer: int, chunk: Chunk) -> Tensor:
        return _latents(view, layer, chunk.table)[: chunk.context]

    def attend_expanded(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        return plainly_attend(q, k, v, scale)


def split_down(down: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens are projected down to -> the queries' latents and the tokens' own, both normed, and the
    rotated part of the key turned. See ``StepLatent.store_normed``."""
    q, kv, key = torch.split(down, [norms.q_rank, norms.kv_rank, cos.shape[-1]], dim=-1)
    turned = rotate(key[:, None], cos, sin)[:, 0]
    latents = torch.cat((norms.kv.of(kv).to(down.dtype), turned), dim=-1)
    return q if norms.q is None else norms.q.of(q).to(down.dtype), latents


def absorbed_queries(q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, factors: Tensor | None) -> Tensor:
    """See ``StepLatent.absorb``."""
    nope, rope = torch.split(q, [q.shape[-1] - cos.shape[-1], cos.shape[-1]], dim=-1)
    made = torch.bmm(nope.transpose(0, 1), up[:, : nope.shape[-1]]).transpose(0, 1)
    wide = torch.cat((made, rotate(rope, cos, sin)), dim=-1)
    return wide if factors is None else wide.mul_(factors)


def values_of_sums(sums: Tensor, up: Tensor, value_dim: int) -> Tensor:
    """See ``StepLatent.make_values``."""
    return torch.bmm(sums.transpose(0, 1), up[:, -value_dim:].mT).transpose(0, 1)


def plainly_attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """See ``LatentPlan.attend_expanded``."""
    queries, keys, values = (x.transpose(0, 1) for x in (q, k, v))
    seen = _causal(len(q), len(k), q.device)
    scores = (queries @ keys.mT).float() * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ values).transpose(0, 1)


def _causal(length: int, context: int, device: torch.device) -> Tensor:
    """[length, context] bool: whether each of the last ``length`` of so many tokens sees each token."""
    return torch.ones(length, context, dtype=torch.bool, device=device).tril(context - length)


def _latents(view: Tensor, layer: int, table: Tensor) -> Tensor:
    """table [..., blocks] -> the latents of its slots [..., blocks * block_size, width]."""
    _, _, layers, _, block_size, width = view.shape
    rows = (table * layers + layer).flatten()
    blocks = view.view(-1, block_size * width).index_select(0, rows)
    return blocks.view(*table.shape[:-1], table.shape[-1] * block_size, width)


def _weighed(q: Tensor, latents: Tensor, seen: Tensor, scale: float, value_dim: int) -> Tensor:
    """q [..., queries, width], latents [..., keys, width], seen [..., queries, keys] or one that expands to
    it -> [..., queries, value_dim]. A query that sees nothing yields zeros."""
    scores = (q @ latents.mT).float() * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
    return weights.to(q.dtype) @ latents[..., :value_dim]
