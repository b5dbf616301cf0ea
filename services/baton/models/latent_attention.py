"""Multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.layers import Linear, RMSNorm
from baton.models.mixer import Mixer
from baton.models.model_step import Narrow, Rotation, Step, latent_plan
from baton.models.quantization.base import Place, QuantizationScheme, empty_parameter
from baton.models.rope import head_order
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.kv_layout import KVPlace
from baton_kernels.latent import LatentPlan
from baton_kernels.paged import Chunk
from baton_kernels.rotary import rotate


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
            self.q_proj = Linear(hidden, queries, dtype, scheme=scheme)
        else:
            down = {"q_a_proj": tuple(range(sizes.q_rank)), **down}
            self.q_a_layernorm = RMSNorm(sizes.q_rank, sizes.eps, dtype)
            self.q_b_proj = Linear(sizes.q_rank, queries, dtype, scheme=scheme)
        self.down_proj = Linear(hidden, down, dtype, bias=config.qkv_bias, scheme=scheme)
        """The projection to the latents of queries (unless they have none) and of keys and values."""
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, sizes.eps, dtype)
        each = sizes.nope_dim + sizes.value_dim
        self.up = empty_parameter(self.heads * each, sizes.kv_rank, dtype=dtype)
        """What makes each head's key and value of a latent; never quantized, as both ways read it."""
        self._rows = slice(shard.heads.start * each, shard.heads.stop * each)
        values = range(shard.heads.start * sizes.value_dim, shard.heads.stop * sizes.value_dim)
        o_bias = config.o_bias and shard.tp_rank == 0  # one rank adds the bias: the outputs are summed
        self.o_proj = Linear(values, hidden, dtype, bias=o_bias, scheme=scheme)

    def places(self) -> dict[str, Place]:
        """The place of the projection that is not a module's, by its name in the checkpoint."""
        return {"kv_b_proj.weight": Place(self.up, (self._rows, slice(None)))}

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Puts the latents into the pool; returns what queries are made of, [T, q_rank], or x itself."""
        sizes, down = self.sizes, self.down_proj(x)
        rank = sizes.q_rank or 0
        latents = torch.empty((len(x), sizes.width), dtype=x.dtype, device=x.device)
        latents[:, : sizes.kv_rank] = self.kv_a_layernorm(down[:, rank : rank + sizes.kv_rank])
        cos, sin = step.rotations[self.rotation]
        latents[:, sizes.kv_rank :] = rotate(down[:, None, rank + sizes.kv_rank :], cos, sin)[:, 0]
        table = self.place.table
        latent_plan(step.plans, table).store(step.views[table], self.place.index, latents)
        return down[:, :rank] if rank else x

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        table, source = self.place.table, self.store(x, step)
        plan, rotation, factors = (
            latent_plan(step.plans, table),
            step.rotations[self.rotation],
            step.query_factors,
        )
        if narrow is not None:
            plan, source = latent_plan(narrow.plans, table), source[narrow.rows]
            rotation = (rotation[0][narrow.rows], rotation[1][narrow.rows])
            factors = None if factors is None else factors[narrow.rows]
        queries = self._queries(source, rotation, factors)
        view = step.views[table]
        if not plan.expanded:
            return self._output(self._absorbed(queries, view, plan))
        out = queries.new_empty((len(queries), self.heads, self.sizes.value_dim))
        if plan.rows is not None and len(plan.rows):
            out[plan.rows] = self._absorbed(queries[plan.rows], view, plan)
        for chunk in plan.expanded:
            rows = slice(chunk.start, chunk.start + chunk.length)
            out[rows] = self._expanded(queries[rows], view, plan, chunk)
        return self._output(out)

    def _output(self, out: Tensor) -> Tensor:
        return self.collectives.sum(self.o_proj(out.flatten(1)))

    def _queries(self, source: Tensor, rotation: Rotation, factors: Tensor | None) -> Tensor:
        """The rotated queries [T, heads, query_dim] of ``source``, as ``store`` returns it."""
        if self.q_a_layernorm is None:
            flat: Tensor = self.q_proj(source)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(source))
        queries = flat.view(len(source), self.heads, self.sizes.query_dim)
        turned = queries[..., self.sizes.nope_dim :]
        turned.copy_(rotate(turned, *rotation))
        return queries if factors is None else queries.mul_(factors)

    @property
    def _of_heads(self) -> tuple[Tensor, Tensor]:
        """What makes each head's key, [heads, nope_dim, kv_rank], and its value, [heads, value_dim, kv_rank],
        of a latent."""
        both = self.up.view(self.heads, -1, self.sizes.kv_rank)
        return both[:, : self.sizes.nope_dim], both[:, self.sizes.nope_dim :]

    def _absorbed(self, queries: Tensor, view: Tensor, plan: LatentPlan) -> Tensor:
        """queries [R, heads, query_dim] -> [R, heads, value_dim]."""
        sizes, (keys, values) = self.sizes, self._of_heads
        wide = queries.new_empty((len(queries), self.heads, sizes.width))
        wide[..., : sizes.kv_rank] = torch.bmm(
            queries[..., : sizes.nope_dim].transpose(0, 1), keys
        ).transpose(0, 1)
        wide[..., sizes.kv_rank :] = queries[..., sizes.nope_dim :]
        sums = plan.attend(view, self.place.index, wide, scale=self.scale, value_dim=sizes.kv_rank)
        return torch.bmm(sums.transpose(0, 1), values.mT).transpose(0, 1)

    def _expanded(self, queries: Tensor, view: Tensor, plan: LatentPlan, chunk: Chunk) -> Tensor:
        """queries [L, heads, query_dim] -> [L, heads, value_dim]."""
        sizes, latents = self.sizes, plan.gather(view, self.place.index, chunk)
        made = (latents[:, : sizes.kv_rank] @ self.up.T).view(len(latents), self.heads, -1)
        rotated = latents[:, None, sizes.kv_rank :].expand(-1, self.heads, -1)
        keys = torch.cat((made[..., : sizes.nope_dim], rotated), dim=-1)
        return plan.attend_expanded(queries, keys, made[..., sizes.nope_dim :], scale=self.scale)


def _rope_order(config: ModelConfig, layer: int) -> Sequence[int]:
    """The order in which the rotated dimensions are kept: see ``head_order``."""
    assert config.latent is not None
    size = config.latent.rope_dim
    return head_order(config.ropes[layer], size) or range(size)
