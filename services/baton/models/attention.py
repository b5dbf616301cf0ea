"""The attention of every family."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.kv_scales import kv_scale_places
from baton.models.layers import Linear, RMSNorm
from baton.models.mixer import Mixer
from baton.models.model_step import Narrow, Step, attention_plan
from baton.models.quantization.base import Place, QuantizationScheme, Rows, empty_parameter, index_of
from baton.models.rope import head_order
from baton.parallel.collectives import Collectives, Parallel
from baton.process.options import ModelError
from baton_kernels.attention import paged_attention, rotate_and_store
from baton_kernels.kv_fp8 import UNSCALED, KVScales
from baton_kernels.kv_layout import KVPlace
from baton_kernels.rotary import HeadNorm, WholeNorm
from baton_kernels.rows import norm_heads, scale_heads, squares_of_heads


class Attention(Mixer):
    """Grouped-query attention over the paged pool, of a rank's heads; the output is the sum over the heads of
    all ranks."""

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
        shard = parallel.shard
        self.collectives: Collectives = parallel.collectives
        self.number = layer
        self.kv = config.kept_by("attention", layer, shard.tp_size)
        self.place = KVPlace(0, layer - shard.layers.start)
        """The place of K and V: at first, in a pool that has all layers of this rank in each block."""
        self.scales = UNSCALED
        """The scales of K and V in the pool: at first, in a pool that has none."""
        self.heads = len(shard.heads)
        self.kv_heads = len(shard.kv_heads)
        self.window = config.windows[layer]
        self.softcap = config.attention_softcap
        self.scale = config.scale
        self.rotation = rotation
        scale = config.query_scale
        self.scales_queries = scale is not None and not (scale.unrotated_only and config.ropes[layer])
        order = head_order(config.ropes[layer], config.head_dim)
        parts = _qkv_parts(config, shard.heads, shard.kv_heads, order)
        self.is_gated = config.attention_gate
        self.qkv_proj = Linear(config.hidden_size, parts, dtype, bias=config.qkv_bias, scheme=scheme)
        # One rank adds the bias: the outputs are summed.
        o_bias = config.o_bias and shard.tp_rank == 0
        query = _of_heads(shard.heads, config.head_dim)
        self.o_proj = Linear(query, config.hidden_size, dtype, bias=o_bias, scheme=scheme.within("o_proj"))
        self.sinks = empty_parameter(self.heads, dtype=torch.float32) if config.sinks else None
        self._own_heads = index_of(shard.heads)
        self.kv_scales = torch.ones(2, dtype=torch.float32)
        """What K and V are divided by before they are rounded to fp8, if the checkpoint says it; else 1."""
        self._has_kv_scales = config.quantization is not None and config.quantization.kv_scales
        self.head_norm = config.head_norm_of(layer)
        self._plain = torch.ones(config.head_dim, dtype=dtype)
        """The weight of a norm that has none."""
        self._eps = config.norm_eps
        self._is_alone = shard.tp_size == 1
        ranks = shard.tp_size * config.head_dim
        # Heads that several ranks hold count as often in the sums of squares as here.
        self._whole_sizes = (self.heads * ranks, self.kv_heads * ranks)
        self.q_norm = self.k_norm = None
        if self.head_norm in ("heads", "rotated", "whole"):
            whole = self.head_norm == "whole"
            q, k = (shard.heads, shard.kv_heads) if whole else (range(1), range(1))
            self.q_norm = _head_norm(config, q, order, dtype)
            self.k_norm = _head_norm(config, k, order, dtype)

    def places(self) -> dict[str, Place]:
        """The places of the sinks and of the scales, by their names in the checkpoint."""
        sinks = {} if self.sinks is None else {"sinks": Place(self.sinks, (self._own_heads,))}
        return sinks | (kv_scale_places(self.kv_scales) if self._has_kv_scales else {})

    def lay_out(self, place: KVPlace, has_layer_scales: bool) -> None:
        """Have K and V at this place of a pool from now on, which holds FP8 or not. ModelError for a scale
        that none can be divided by."""
        self.place, self.scales = place, self.scales_in_fp8() if has_layer_scales else UNSCALED

    def scales_in_fp8(self) -> KVScales:
        """The scales of K and V in a pool of FP8. ModelError for a scale that none can be divided by."""
        try:
            return KVScales(*self.kv_scales.tolist())
        except ValueError as error:
            raise ModelError(f"attention of layer {self.number}: {error}") from None

    def store(self, x: Tensor, step: Step) -> Tensor:
        """Puts K and V into the pool; returns the queries [T, heads, head_dim]."""
        return self._stored(self._projected(x)[0], step)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The queries, keys and values of x, [T, all of them], and the logits of the output's gate [T, heads
        * head_dim]."""
        qkv: Tensor = self.qkv_proj(x)
        if not self.is_gated:
            return qkv, None
        size = qkv.shape[1] * self.heads // (2 * self.heads + 2 * self.kv_heads)
        q, gate, kv = qkv.split_with_sizes([size, size, qkv.shape[1] - 2 * size], dim=1)
        return torch.cat((q, kv), dim=1), gate

    def _stored(self, qkv: Tensor, step: Step) -> Tensor:
        if (whole := self.whole_norm) is not None:
            self._norm_whole(qkv, whole)
        cos, sin = step.rotations[self.rotation]
        heads = qkv.view(len(qkv), self.heads + 2 * self.kv_heads, -1)
        norm = self.norm_before_rotation
        view, plan = step.views[self.place.table], attention_plan(step.plans, self.place.table)
        q = rotate_and_store(
            view, self.place.index, heads, plan, cos=cos, sin=sin, norm=norm, scales=self.scales
        )
        if self.head_norm == "rotated":
            assert self.q_norm is not None and self.k_norm is not None
            q.mul_(self.q_norm.weight.float() * self.k_norm.weight)
        if self.scales_queries and step.query_factors is not None:
            q.mul_(step.query_factors)
        return q

    def forward(self, x: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        table = self.place.table
        qkv, gate = self._projected(x)
        q, plan = self._stored(qkv, step), attention_plan(step.plans, table)
        if narrow is not None:
            q, plan = q[narrow.rows], attention_plan(narrow.plans, table)
            gate = None if gate is None else gate[narrow.rows]
        out = paged_attention(
            step.views[table],
            self.place.index,
            q,
            plan,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            scales=self.scales,
        )
        flat = out.flatten(1)
        if gate is not None:
            flat = (flat * torch.sigmoid(gate.float())).to(flat.dtype)
        return self.collectives.sum(self.o_proj(flat))

    @property
    def adjusts_queries(self) -> bool:
        """Whether queries are multiplied by anything once they are rotated."""
        return self.scales_queries or self.head_norm == "rotated"

    @property
    def whole_norm(self) -> WholeNorm | None:
        """The norm of all heads together before they are rotated; None: no norm."""
        if self.head_norm != "whole":
            return None
        assert self.q_norm is not None and self.k_norm is not None
        return WholeNorm(self.q_norm.weight, self.k_norm.weight, self._eps, self.q_norm.offset)

    def _norm_whole(self, qkv: Tensor, norm: WholeNorm) -> None:
        if self._is_alone:
            norm_heads(qkv, norm)
        else:
            scale_heads(qkv, self.collectives.sum(squares_of_heads(qkv, norm)), norm, self._whole_sizes)

    @property
    def norm_before_rotation(self) -> HeadNorm | None:
        """The norm of each head before it is rotated; None: no norm.

        Rotating does not change a head's size. So a norm behind it divides as well in front of it; its
        weights, which multiply the same dimensions of queries and keys, are left to the queries."""
        match self.head_norm:
            case "heads":
                assert self.q_norm is not None and self.k_norm is not None
                return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)
            case "plain" | "rotated":
                return HeadNorm(self._plain, self._plain, self._eps)
            case _:
                return None


def _head_norm(config: ModelConfig, heads: range, order: Sequence[int] | None, dtype: torch.dtype) -> RMSNorm:
    """A norm over the dimensions of these heads together."""
    rows = _ordered(heads, config.head_dim, order)
    return RMSNorm(len(rows), config.norm_eps, dtype, offset=config.norm_offset, rows=rows)


def _qkv_parts(
    config: ModelConfig, heads: range, kv_heads: range, order: Sequence[int] | None
) -> dict[str, Rows]:
    """The rows of a rank's query, key and value heads in the checkpoint."""
    dim = config.head_dim
    q, k, v = _ordered(heads, dim, order), _ordered(kv_heads, dim, order), _of_heads(kv_heads, dim)
    if config.attention_gate:
        q = _with_gates(heads, dim, order or range(dim))
    if not config.fused_qkv:
        return {"q_proj": q, "k_proj": k, "v_proj": v}
    keys = config.num_heads * dim
    values = keys + config.num_kv_heads * dim
    return {"qkv_proj": (*q, *(keys + row for row in k), *(values + row for row in v))}


def _with_gates(heads: range, head_dim: int, order: Sequence[int]) -> Rows:
    """The rows of queries, and then of the gates that follow each head's query."""
    firsts = [2 * head_dim * head for head in heads]
    queries = (first + row for first in firsts for row in order)
    return (*queries, *(first + head_dim + row for first in firsts for row in range(head_dim)))


def _of_heads(heads: range, head_dim: int) -> range:
    """The rows of the heads ``heads``."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _ordered(heads: range, head_dim: int, order: Sequence[int] | None) -> Rows:
    """The rows of the heads ``heads``, those of each head in ``order`` (None: as they are)."""
    if order is None:
        return _of_heads(heads, head_dim)
    return tuple(head * head_dim + row for head in heads for row in order)
