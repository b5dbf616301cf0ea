"""The scheme ``none``: weights of the type that they are multiplied with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.quantization.base import (
    ExpertMatrix,
    ExpertsMultiplier,
    ExpertsShape,
    ExpertsWeights,
    LinearShape,
    LinearWeights,
    Multiplier,
    Place,
    QuantizationScheme,
    empty_parameter,
)
from baton.models.quantization.experts_format import ExpertNames
from baton.models.quantization.registry import Quantization
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.experts import multiply, warm_up
from baton_kernels.rows import activated, gated_product


class PlainWeights(LinearWeights):
    """A weight [outputs, inputs] and its bias [outputs]."""

    def __init__(self, shape: LinearShape, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.shape = shape
        self.weight = weight
        self.bias = bias

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        named = {"weight": self.weight, "bias": self.bias}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    def places(self) -> Mapping[str, Mapping[str, Place]]:
        found: dict[str, Mapping[str, Place]] = {}
        for name, rows, source in self.shape.part_rows():
            weight = Place(self.weight[rows], (source, self.shape.columns))
            bias = {} if self.bias is None else {"bias": Place(self.bias[rows], (source,))}
            found[name] = {"weight": weight, **bias}
        return found

    def plain(self) -> Tensor:
        return self.weight

    def pack(self) -> Multiplier:
        shape = self.shape
        packed = PackedWeight.of(
            self.weight,
            self.bias,
            gated=shape.gated,
            dtype=shape.dtype,
            activation=shape.activation,
            is_last=True,
        )
        return self if packed is None else packed

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        product, activation = F.linear(x, self.weight, self.bias), self.shape.activation
        if activation is not None:
            activate = gated_product if self.shape.gated else activated
            product = activate(product, activation)
        return product if out_dtype is None else product.to(out_dtype)


class PlainExperts(ExpertsWeights):
    """The weights of experts, of the type of the activations."""

    def __init__(self, shape: ExpertsShape, gate_up: nn.Parameter, down: nn.Parameter) -> None:
        """``gate_up`` [E, 2 * inner, hidden], or [E, inner, hidden] without gates, and ``down`` [E, hidden,
        inner]."""
        super().__init__(shape)
        self.gate_up = gate_up
        self.down = down

    @property
    def matrices(self) -> Mapping[str, nn.Parameter]:
        return {"gate_up": self.gate_up, "down": self.down}

    def matrix_places(
        self, name: ExpertMatrix, expert: int, rows: slice, source: tuple[slice, slice]
    ) -> Mapping[str, Place]:
        return {"weight": Place(self.matrices[name][expert, rows], source)}

    def matrix_tensor(self, name: ExpertMatrix, kind: str) -> Tensor:
        return self.matrices[name]

    def pack(self) -> ExpertsMultiplier:
        shape, biases = self.shape, (self.gate_up_bias, self.down_bias)
        packed = PackedExperts.of(self.gate_up, self.down, *biases, activation=shape.activation)
        return self if packed is None else packed

    def multiply(self, x: Tensor, experts: Tensor, weights: Tensor, weighs_input: bool) -> Tensor:
        return multiply(x, experts, weights, self._tensors, weighs_input)

    def warm_up(self, top_k: int, weighs_input: bool) -> None:
        warm_up(self._tensors, top_k, weighs_input)

    @property
    def _tensors(self) -> ExpertTensors:
        biases = self.gate_up_bias, self.down_bias
        return ExpertTensors(self.gate_up, self.down, *biases, self.shape.activation)


class PlainScheme(QuantizationScheme):
    """The scheme of plain weights. Works on every device and with every type."""

    name: Quantization = "none"

    def as_stored(self) -> PlainScheme:
        return self

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def allocate(self, shape: LinearShape) -> PlainWeights:
        weight = empty_parameter(shape.num_rows, len(shape.inputs), dtype=shape.dtype)
        bias = empty_parameter(shape.num_rows, dtype=shape.dtype) if shape.bias else None
        return PlainWeights(shape, weight, bias)

    def allocate_experts(self, shape: ExpertsShape, names: ExpertNames) -> PlainExperts:
        experts, hidden, inner = len(shape.experts), shape.hidden, len(shape.inner)
        gate_up = empty_parameter(experts, shape.gate_up_rows, hidden, dtype=shape.dtype)
        return PlainExperts(shape, gate_up, empty_parameter(experts, hidden, inner, dtype=shape.dtype))

    def tied(self, weight: nn.Parameter) -> PlainWeights:
        return PlainWeights(LinearShape.of(weight), weight, None)


PLAIN = PlainScheme()
