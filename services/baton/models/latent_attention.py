"""Multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.kv_scales import kv_scale_places
from baton.models.layers import Linear, RMSNorm
from baton.models.mixer import Mixer
from baton.models.model_step import Narrow, Step, latent_plan
from baton.models.quantization.base import LinearShape, LinearWeights, Place, QuantizationScheme
from baton.models.rope import head_order
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.cpu.latent import WIDTH, CpuLatentPlan
from baton_kernels.cpu.layers import LatentWeights
from baton_kernels.kv_layout import KVPlace
from baton_kernels.latent import LatentPlan
from baton_kernels.latent_norms import LatentNorms
from baton_kernels.paged import Chunk
from baton_kernels.rotary import rotate

MADE_NUMBERS = 1 << 26
"""Most numbers of keys and values that are made of latents at a time."""


class LatentAttention(Mixer):
    """Attention of a rank's query heads, whose keys and values are made of one latent a token; the output is
    the sum over the heads of all ranks. Every rank keeps the whole latent.

    Two ways lead to the same result. Expanded, the latents of the context become keys and values of each
    head. Absorbed, the part of the projection that makes keys is applied to the queries instead, and the part
    that makes values to the sums of latents: so that many tokens' latents are read as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
        rotation: int = 0,
    ) -> None:
        """``layer``: the layer's index in the whole model. ``rotation``: the index of its rotation among
        ``Step.rotations``."""
        super().__init__()
        assert config.latent is not None, "a family's config names the sizes"
        shard, sizes, hidden = parallel.shard, config.latent, config.hidden_size
        self.sizes = sizes
        self.collectives: Collectives = parallel.collectives
        self.number = layer
        self.kv = config.kept_by("latent", layer, shard.tp_size)
        self.place = KVPlace(0, layer - shard.layers.start)
        self.heads = len(shard.heads)
        self.scale = config.scale
        self._dtype = dtype
        self.rotation = rotation
        order = _rope_order(config, layer)
        queries = tuple(
            head * sizes.query_dim + row
            for head in shard.heads
            for row in (*range(sizes.nope_dim), *(sizes.nope_dim + row for row in order))
        )
        latent = (*range(sizes.kv_rank), *(sizes.kv_rank + row for row in order))
        down = {"kv_a_proj_with_mqa": latent}
        self.q_a_layernorm = None
        if sizes.q_rank is None:
            self.q_proj = Linear(hidden, queries, dtype, scheme=scheme.within("q_proj"))
        else:
            down = {"q_a_proj": tuple(range(sizes.q_rank)), **down}
            self.q_a_layernorm = RMSNorm(sizes.q_rank, sizes.eps, dtype)
            self.q_b_proj = Linear(sizes.q_rank, queries, dtype, scheme=scheme.within("q_b_proj"))
        self.down_proj = Linear(hidden, down, dtype, bias=config.qkv_bias, scheme=scheme, apart=True)
        """The projection to the latents of queries (unless they have none) and of keys and values."""
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, sizes.eps, dtype)
        each = sizes.nope_dim + sizes.value_dim
        rows = range(shard.heads.start * each, shard.heads.stop * each)
        up = LinearShape(range(sizes.kv_rank), {"kv_b_proj": rows}, dtype)
        self._up_weights: LinearWeights | None = scheme.as_stored().allocate(up)
        for name, parameter in self._up_weights.parameters.items():
            self.register_parameter(f"up_{name}", parameter)
        self.kv_scales = torch.ones(2, dtype=torch.float32)
        """What K and V are divided by before they are rounded to fp8, if the checkpoint says it; else 1."""
        self._has_kv_scales = config.quantization is not None and config.quantization.kv_scales
        self.up: Tensor | None = None
        """What makes each head's key and value of a latent, once it is packed: plain, as both ways read
        it."""
        values = range(shard.heads.start * sizes.value_dim, shard.heads.stop * sizes.value_dim)
        o_bias = config.o_bias and shard.tp_rank == 0  # one rank adds the bias: the outputs are summed
        self.o_proj = Linear(values, hidden, dtype, bias=o_bias, scheme=scheme.within("o_proj"))

    def places(self) -> dict[str, Place]:
        """The places of what is no module's, by their names in the checkpoint: of the projection, and of the
        scales."""
        up = {} if self._up_weights is None else self._up_weights.places()["kv_b_proj"]
        return {
            **{f"kv_b_proj.{kind}": place for kind, place in up.items()},
            **(kv_scale_places(self.kv_scales) if self._has_kv_scales else {}),
        }

    def pack(self) -> None:
        assert self._up_weights is not None, "packed once"
        up, kept = self._up_weights.plain(), self._up_weights.parameters
        if all(up is not parameter for parameter in kept.values()):
            for name in kept:
                self.register_parameter(f"up_{name}", None)
            self._up_weights = None
        self.up = up

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Puts the latents into the pool; returns what queries are made of, [T, q_rank], or x itself."""
        table = self.place.table
        cos, sin = step.rotations[self.rotation]
        source = latent_plan(step.plans, table).store_normed(
            step.views[table], self.place.index, self.down_proj(x), self._norms, cos, sin
        )
        return x if self.q_a_layernorm is None else source

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        table, source = self.place.table, self.store(x, step)
        plan = latent_plan(step.plans, table)
        turns = _Turns(*step.rotations[self.rotation], step.query_factors)
        if narrow is not None:
            plan, source, turns = latent_plan(narrow.plans, table), source[narrow.rows], turns.of(narrow.rows)
        queries = self._queries(source)
        out = self._attended(queries, turns, step.views[table], plan)
        return self.collectives.sum(self.o_proj(out.flatten(1)))

    @property
    def packed(self) -> LatentWeights | None:
        """The weights for a CPU's kernels, besides the projections to latents and of the output; None if
        they do not take them."""
        queries = (self.q_proj if self.q_a_layernorm is None else self.q_b_proj).packed
        sizes = self.sizes
        if queries is None or sizes.kv_rank % WIDTH or not CpuLatentPlan.takes(self._dtype, sizes.width):
            return None
        up = self._up_of_heads
        return LatentWeights(queries, self._norms, up, sizes.nope_dim, sizes.rope_dim, sizes.value_dim)

    @property
    def _norms(self) -> LatentNorms:
        q = None if self.q_a_layernorm is None else self.q_a_layernorm.as_norm
        return LatentNorms(q, self.kv_a_layernorm.as_norm)

    def _queries(self, source: Tensor) -> Tensor:
        """The queries [T, heads, query_dim] of ``source``, as ``store`` returns it, not rotated."""
        projection = self.q_proj if self.q_a_layernorm is None else self.q_b_proj
        flat: Tensor = projection(source)
        return flat.view(len(source), self.heads, self.sizes.query_dim)

    def _attended(self, queries: Tensor, turns: _Turns, view: Tensor, plan: LatentPlan) -> Tensor:
        """queries [R, heads, query_dim], not rotated -> [R, heads, value_dim]."""
        if not plan.expanded:
            return self._absorbed(queries, turns, view, plan)
        out = queries.new_empty((len(queries), self.heads, self.sizes.value_dim))
        if plan.rows is not None and len(plan.rows):
            out[plan.rows] = self._absorbed(queries[plan.rows], turns.of(plan.rows), view, plan)
        for chunk in plan.expanded:
            rows = slice(chunk.start, chunk.start + chunk.length)
            out[rows] = self._expanded(queries[rows], turns.of(rows), view, plan, chunk)
        return out

    def _absorbed(self, queries: Tensor, turns: _Turns, view: Tensor, plan: LatentPlan) -> Tensor:
        """Attend by rows that read the latents as they are: shapes as in ``_attended``."""
        up, sizes = self._up_of_heads, self.sizes
        wide = plan.absorb(queries, up, turns.cos, turns.sin, turns.factors)
        sums = plan.attend(view, self.place.index, wide, scale=self.scale, value_dim=sizes.kv_rank)
        return plan.make_values(sums, up, sizes.value_dim)

    def _expanded(
        self, queries: Tensor, turns: _Turns, view: Tensor, plan: LatentPlan, chunk: Chunk
    ) -> Tensor:
        """Attend by a chunk whose keys and values are made of the latents, shapes as in ``_attended``; some
        heads at a time, as these take much more memory."""
        sizes, latents = self.sizes, plan.gather(view, self.place.index, chunk)
        turned = queries[..., sizes.nope_dim :]
        turned.copy_(rotate(turned, turns.cos, turns.sin))
        if turns.factors is not None:
            queries.mul_(turns.factors)
        out = queries.new_empty((len(queries), self.heads, sizes.value_dim))
        each = max(1, MADE_NUMBERS // (len(latents) * (sizes.query_dim + sizes.value_dim)))
        for first in range(0, self.heads, each):
            heads = slice(first, first + each)
            up = self._up_of_heads[heads]
            made = (latents[:, : sizes.kv_rank] @ up.flatten(0, 1).T).view(len(latents), len(up), -1)
            rotated = latents[:, None, sizes.kv_rank :].expand(-1, len(up), -1)
            keys = torch.cat((made[..., : sizes.nope_dim], rotated), dim=-1)
            values = made[..., sizes.nope_dim :]
            out[:, heads] = plan.attend_expanded(queries[:, heads], keys, values, scale=self.scale)
        return out

    @property
    def _up_of_heads(self) -> Tensor:
        """What makes keys and values of a latent, [heads, nope_dim + value_dim, kv_rank]."""
        assert self.up is not None, "not packed"
        return self.up.view(self.heads, -1, self.sizes.kv_rank)


@dataclass(frozen=True, slots=True)
class _Turns:
    """What is done to queries by their position."""

    cos: Tensor
    sin: Tensor
    factors: Tensor | None

    def of(self, rows: Tensor | slice) -> _Turns:
        return _Turns(self.cos[rows], self.sin[rows], None if self.factors is None else self.factors[rows])


def _rope_order(config: ModelConfig, layer: int) -> Sequence[int]:
    """The order in which the rotated dimensions are kept: see ``head_order``."""
    assert config.latent is not None
    size = config.latent.rope_dim
    return head_order(config.ropes[layer], size) or range(size)
