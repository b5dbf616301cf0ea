"""The scheme ``int8``: weights of a plain checkpoint, rounded as they are loaded. Activations keep their
type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.quantization.base import (
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
from baton.models.quantization.registry import Quantization
from baton.process.options import ModelError
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight, kernels_for
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.experts import loop_over_experts
from baton_kernels.int8 import quantize
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.rows import activated, gated_product


@dataclass(frozen=True, slots=True)
class RoundedPlace(Place):
    """Memory for int8, each row with a scale. A part of the columns has the scales of the whole rows, so
    weights are the same however a model is split."""

    scales: Tensor

    def load(self, found: Tensor) -> None:
        rows, columns = self.source
        rounded = quantize(found[rows])
        self.tensor.copy_(rounded.codes[:, columns])
        self.scales.copy_(rounded.scales)

    def direct(self, shape: torch.Size) -> None:
        return None


class Int8Weights(LinearWeights):
    """Rounded weights [outputs, inputs], float32 scales [outputs, 1], and a plain bias."""

    def __init__(
        self, shape: LinearShape, values: nn.Parameter, scales: Tensor, bias: nn.Parameter | None
    ) -> None:
        self.shape = shape
        self.values = values
        self.scales = scales
        self.bias = bias

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        named = {"weight": self.values, "bias": self.bias}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    def places(self) -> Mapping[str, Mapping[str, Place]]:
        found: dict[str, Mapping[str, Place]] = {}
        for name, rows, source in self.shape.part_rows():
            weight = RoundedPlace(self.values[rows], (source, self.shape.columns), self.scales[rows])
            bias = {} if self.bias is None else {"bias": Place(self.bias[rows], (source,))}
            found[name] = {"weight": weight, **bias}
        return found

    def pack(self) -> Multiplier:
        shape = self.shape
        packed = PackedWeight.of(
            self._weight, self.bias, gated=shape.gated, dtype=shape.dtype, activation=shape.activation
        )
        return self if packed is None else packed

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        weight = self._weight.dequantized().to(x.dtype)
        product, activation = F.linear(x, weight, self.bias), self.shape.activation
        if activation is not None:
            activate = gated_product if self.shape.gated else activated
            product = activate(product, activation)
        return product if out_dtype is None else product.to(out_dtype)

    @property
    def _weight(self) -> QuantizedWeight:
        return QuantizedWeight("int8", self.values, self.scales)


class Int8Experts(ExpertsWeights):
    """Rounded weights of experts, float32 scales [E, rows, 1], and plain biases."""

    def __init__(self, shape: ExpertsShape, gate_up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__(shape, gate_up, down)
        self.gate_up_scales = torch.empty((*gate_up.shape[:2], 1), dtype=torch.float32)
        self.down_scales = torch.empty((*down.shape[:2], 1), dtype=torch.float32)

    def place(
        self, name: Literal["gate_up", "down"], expert: int, rows: slice, source: tuple[slice, slice]
    ) -> Place:
        weight = self._gate_up if name == "gate_up" else self._down
        return RoundedPlace(weight.codes[expert, rows], source, weight.scales[expert, rows])

    @property
    def _gate_up(self) -> QuantizedWeight:
        return QuantizedWeight("int8", self.gate_up, self.gate_up_scales)

    @property
    def _down(self) -> QuantizedWeight:
        return QuantizedWeight("int8", self.down, self.down_scales)

    def pack(self) -> ExpertsMultiplier:
        shape, biases = self.shape, (self.gate_up_bias, self.down_bias)
        packed = PackedExperts.of(
            self._gate_up, self._down, *biases, activation=shape.activation, dtype=shape.dtype
        )
        return self if packed is None else packed

    def multiply(self, x: Tensor, experts: Tensor, weights: Tensor, weighs_input: bool) -> Tensor:
        gate_up, down = (weight.dequantized().to(x.dtype) for weight in (self._gate_up, self._down))
        tensors = ExpertTensors(gate_up, down, self.gate_up_bias, self.down_bias, self.shape.activation)
        return loop_over_experts(x, experts, weights, tensors, weighs_input)

    def warm_up(self, top_k: int, weighs_input: bool) -> None:
        """Does nothing: rounded weights are multiplied on CPUs alone."""


class Int8Scheme(QuantizationScheme):
    """The scheme of int8 weights. Works on a CPU that has Baton's kernels."""

    name: ClassVar[Quantization] = "int8"

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if kernels_for(device, dtype) is not None:
            return
        if device.type != "cpu":
            where = f"on {device.type}"
        elif kernels_for(device, torch.float32) is None:
            where = "without the CPU's kernels (BATON_CPU_KERNELS=native says why there are none)"
        else:
            where = f"with dtype {str(dtype).removeprefix('torch.')}"
        raise ModelError(f"quantization (--quantization) is int8; allowed {where}: none")

    def allocate(self, shape: LinearShape) -> Int8Weights:
        rows, inputs = shape.num_rows, len(shape.inputs)
        _check_inputs(inputs)
        return Int8Weights(
            shape,
            empty_parameter(rows, inputs, dtype=torch.int8),
            torch.empty((rows, 1), dtype=torch.float32),
            empty_parameter(rows, dtype=shape.dtype) if shape.bias else None,
        )

    def allocate_experts(self, shape: ExpertsShape) -> Int8Experts:
        experts, hidden, inner = len(shape.experts), shape.hidden, len(shape.inner)
        for inputs in (hidden, inner):
            _check_inputs(inputs)
        gate_up = empty_parameter(experts, shape.gate_up_rows, hidden, dtype=torch.int8)
        return Int8Experts(shape, gate_up, empty_parameter(experts, hidden, inner, dtype=torch.int8))

    def tied(self, weight: nn.Parameter) -> Int8Weights:
        rounded = quantize(weight)
        codes = nn.Parameter(rounded.codes, requires_grad=False)
        return Int8Weights(LinearShape.of(weight), codes, rounded.scales, None)


def _check_inputs(inputs: int) -> None:
    if inputs % 2:
        raise ModelError(
            f"quantization is int8; allowed for a projection of {inputs} inputs, an odd number: none"
        )


INT8 = Int8Scheme()
