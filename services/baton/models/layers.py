"""The layers that model families share. Activations are [T, ...]: all tokens of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig
from baton.models.quantization.base import (
    Index,
    LinearShape,
    LinearWeights,
    Multiplier,
    QuantizationScheme,
    Rows,
    empty_parameter,
    index_of,
)
from baton.models.quantization.plain import PLAIN
from baton.parallel.collectives import Collectives, Parallel
from baton_kernels.activation_kind import SILU, Activation
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.norm import Norm


@dataclass(frozen=True, slots=True)
class Increment:
    """What a part of a layer adds to the residual stream, before it is added."""

    value: Tensor
    """[T, hidden]."""
    norm: Norm | None = None
    """The norm that it passes first; None: no norm."""


def _span(rows: int | Rows) -> Rows:
    return range(rows) if isinstance(rows, int) else rows


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


class Embedding(nn.Module):
    """token_ids [T] -> [T, hidden]. With a part of the vocabulary, ids of other parts give zeros."""

    def __init__(self, ids: range, size: int, dtype: torch.dtype, *, is_part: bool) -> None:
        """``ids``: the token ids that have a row here."""
        super().__init__()
        self.ids = ids
        self.is_part = is_part
        self.weight: nn.Parameter | None = empty_parameter(len(ids), size, dtype=dtype)
        """The rows; None: a packed output head has them."""
        self.source = (_slice(ids), slice(None))
        self._head: PackedWeight | None = None

    def look_up_in(self, head: PackedWeight) -> None:
        """Look up rows in the packed output head, which is the same weight, and free them here."""
        self._head, self.weight = head, None

    def forward(self, token_ids: Tensor) -> Tensor:
        if not self.is_part:
            return self._rows(token_ids)
        rows = token_ids - self.ids.start
        elsewhere = (rows < 0) | (rows >= len(self.ids))
        return self._rows(rows.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0)

    def _rows(self, rows: Tensor) -> Tensor:
        if self._head is not None:
            return self._head.rows(rows)
        assert self.weight is not None
        return F.embedding(rows, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32. The result has the
    weight's type, whatever type x has."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, *, offset: float = 0.0, rows: Rows | None = None
    ) -> None:
        """``offset`` is added to the weight. ``rows``: the part of the checkpoint's weight that is here, in
        this order; None: all of it."""
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = empty_parameter(size, dtype=dtype)
        self.source: tuple[Index, ...] = (slice(None) if rows is None else index_of(rows),)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype and not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.as_norm.of(x).to(self.weight.dtype)

    @property
    def as_norm(self) -> Norm:
        """The norm, for kernels."""
        return Norm(self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype) if bias else None
        self.source: tuple[Index, ...] = (slice(None),)

    @property
    def as_norm(self) -> Norm:
        """The norm, for kernels."""
        return Norm(self.weight, self.eps, centered=True, bias=self.bias)


def stream_norm(config: ModelConfig, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """A norm over the hidden size, of the kind that the model has."""
    if config.layer_norm:
        return LayerNorm(config.hidden_size, config.norm_eps, dtype, bias=config.norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, offset=config.norm_offset)


class Linear(nn.Module):
    """[T, inputs] -> [T, outputs]: one projection, or several of the same input as one matmul. A range
    selects these inputs or outputs of the checkpoint's."""

    gated: ClassVar[bool] = False

    def __init__(
        self,
        inputs: int | range,
        outputs: int | Rows | Mapping[str, int | Rows],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        scheme: QuantizationScheme = PLAIN,
        activation: Activation | None = None,
        apart: bool = False,
    ) -> None:
        """``outputs`` of several projections are by each one's name in the checkpoint. ``dtype``: the type of
        inputs and outputs. ``activation`` is applied to the outputs. ``apart``: see ``LinearShape``."""
        super().__init__()
        parts = outputs if isinstance(outputs, Mapping) else {"": outputs}
        spans = {name: _span(rows) for name, rows in parts.items()}
        columns = range(inputs) if isinstance(inputs, int) else inputs
        shape = LinearShape(columns, spans, dtype, bias, self.gated, activation, apart)
        weights = scheme.allocate(shape)
        for name, parameter in weights.parameters.items():
            self.register_parameter(name, parameter)
        self.weights: LinearWeights | None = weights
        """The weights until they are packed; None once they are no longer needed."""
        self.multiplier: Multiplier = weights

    def pack(self) -> None:
        """Lay the weights out as the kernels of their device read them, and free memory that is unused
        then."""
        assert self.weights is not None, "packed once"
        self.multiplier = self.weights.pack()
        if self.multiplier is not self.weights:
            for name in self.weights.parameters:
                self.register_parameter(name, None)
            self.weights = None

    @property
    def packed(self) -> PackedWeight | None:
        """The weights for a CPU's kernels; None if something else multiplies."""
        return self.multiplier if isinstance(self.multiplier, PackedWeight) else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplier.multiply(x)


class GatedLinear(Linear):
    """activation(gate(x)) * up(x): [T, inputs] -> [T, size]."""

    gated: ClassVar[bool] = True

    def __init__(
        self,
        inputs: int,
        size: int | range,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        scheme: QuantizationScheme = PLAIN,
        activation: Activation = SILU,
        fused: int = 0,
    ) -> None:
        """``fused``: the gate's rows where the checkpoint has both projections as one tensor; 0: it has
        two."""
        rows = _span(size)
        parts: dict[str, Rows] = {"gate_proj": rows, "up_proj": rows}
        if fused:
            parts = {"gate_up_proj": (*rows, *(fused + row for row in rows))}
        super().__init__(inputs, parts, dtype, bias=bias, scheme=scheme, activation=activation)


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202), or down(activation(up(x))), of a
    rank's inner rows; the output is the sum over the rows of all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
        size: int | None = None,
    ) -> None:
        """``size``: the inner rows of all ranks; None: intermediate_size."""
        super().__init__()
        shard, hidden, bias = parallel.shard, config.hidden_size, config.mlp_bias
        self.collectives: Collectives = parallel.collectives
        whole = config.intermediate_size if size is None else size
        inner, activation = shard.part(whole), config.activation
        self.gate_up_proj = (
            GatedLinear(
                hidden,
                inner,
                dtype,
                bias=bias,
                scheme=scheme,
                activation=activation,
                fused=whole if config.fused_gate_up else 0,
            )
            if config.gated_mlp
            else Linear(hidden, {"up_proj": inner}, dtype, bias=bias, scheme=scheme, activation=activation)
        )
        down_bias = bias and shard.tp_rank == 0
        self.down_proj = Linear(inner, hidden, dtype, bias=down_bias, scheme=scheme.within("down_proj"))

    @property
    def packed(self) -> tuple[PackedWeight, PackedWeight] | None:
        """The packed weights of both projections; None if one is not packed."""
        gate_up, down = self.gate_up_proj.packed, self.down_proj.packed
        return None if gate_up is None or down is None else (gate_up, down)

    def part(self, x: Tensor) -> Tensor:
        """The rank's part of the output, before the sum."""
        part: Tensor = self.down_proj(self.gate_up_proj(x))
        return part

    def forward(self, x: Tensor) -> Tensor:
        return self.collectives.sum(self.part(x))
