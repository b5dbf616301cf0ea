"""Schemes that round the weights of a plain checkpoint as they are loaded. Activations keep their type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton.models.quantization.base import (
    ExpertMatrix,
    ExpertsShape,
    Index,
    LinearShape,
    Place,
    QuantizationScheme,
)
from baton.models.quantization.experts_format import ExpertNames
from baton.models.quantization.plain import PLAIN, PlainScheme
from baton.models.quantization.quantized import QuantizedExperts, QuantizedWeights
from baton.models.quantization.registry import Quantization
from baton.models.quantization.weight_spec import WeightSpec
from baton.process.options import ModelError
from baton_kernels.cpu.linear import kernels_for
from baton_kernels.fp8 import quantize_fp8
from baton_kernels.int8 import quantize
from baton_kernels.quantized import QuantizedWeight

Rounding = Callable[[Tensor], QuantizedWeight]
"""A function that rounds a weight [rows, inputs], with a scale for each row."""


@dataclass(frozen=True, slots=True)
class RoundedPlace(Place):
    """Memory for codes, each row with a scale. A part of the columns has the scales of the whole rows, so
    weights are the same however a model is split."""

    scales: Tensor
    round: Rounding
    kept: WeightSpec

    @property
    def spec(self) -> WeightSpec:
        return self.kept

    def load(self, found: Tensor) -> None:
        rows, columns = self.source
        rounded = self.round(found[rows])
        self.tensor.copy_(rounded.codes[:, columns])
        self.scales.copy_(rounded.scales)

    def direct(self, shape: torch.Size) -> None:
        return None


class RoundedWeights(QuantizedWeights):
    """Weights [outputs, inputs] that are rounded row by row, and a plain bias."""

    def __init__(self, shape: LinearShape, spec: WeightSpec, rounding: Rounding) -> None:
        super().__init__(shape, spec)
        self._round = rounding

    def tensor_places(self, part: int, rows: slice, source: tuple[Index, slice]) -> Mapping[str, Place]:
        codes, scales = self.slots.tensors["codes"], self.slots.tensors["scales"]
        return {"weight": RoundedPlace(codes[rows], source, scales[rows], self._round, self.slots.spec)}


class RoundedExperts(QuantizedExperts):
    """Experts' matrices that are rounded row by row, and plain biases."""

    def __init__(self, shape: ExpertsShape, spec: WeightSpec, rounding: Rounding) -> None:
        super().__init__(shape, spec, spec)
        self._round = rounding

    @property
    def holds_transposed(self) -> bool:
        return True

    def matrix_places(
        self, name: ExpertMatrix, expert: int, rows: slice, source: tuple[slice, slice]
    ) -> Mapping[str, Place]:
        tensors = self.slots[name].tensors
        codes, scales = tensors["codes"][expert, rows], tensors["scales"][expert, rows]
        return {"weight": RoundedPlace(codes, source, scales, self._round, self.slots[name].spec)}

    def matrix_tensor(self, name: ExpertMatrix, kind: str) -> Tensor:
        return self.slots[name].tensors["codes"]


class RoundedScheme(QuantizationScheme):
    """The scheme of weights that are rounded row by row as they are loaded."""

    def __init__(self, name: Quantization, spec: WeightSpec, rounding: Rounding) -> None:
        self.name = name
        self._spec = spec
        self._round = rounding

    def as_stored(self) -> PlainScheme:
        return PLAIN

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu" or kernels_for(device, dtype) is not None:
            return
        where = f"with dtype {str(dtype).removeprefix('torch.')}"
        if kernels_for(device, torch.float32) is None:
            where = "without the CPU's kernels (BATON_CPU_KERNELS=native says why there are none)"
        raise ModelError(f"quantization (--quantization) is {self.name}; allowed {where}: none")

    def allocate(self, shape: LinearShape) -> RoundedWeights:
        self._check_inputs(len(shape.inputs))
        return RoundedWeights(shape, self._spec, self._round)

    def allocate_experts(self, shape: ExpertsShape, names: ExpertNames) -> RoundedExperts:
        for inputs in (shape.hidden, len(shape.inner)):
            self._check_inputs(inputs)
        return RoundedExperts(shape, self._spec, self._round)

    def tied(self, weight: nn.Parameter) -> RoundedWeights:
        with weight.device:
            rounded = RoundedWeights(LinearShape.of(weight), self._spec, self._round)
        rounded.places()[""]["weight"].load(weight)
        return rounded

    def _check_inputs(self, inputs: int) -> None:
        if inputs % 2:
            raise ModelError(
                f"quantization is {self.name}; allowed for a projection of {inputs} inputs, an odd number: "
                "none"
            )


INT8 = RoundedScheme("int8", WeightSpec("", "int8"), quantize)
FP8 = RoundedScheme("fp8", WeightSpec("", "fp8", rounding="fp8-row"), quantize_fp8)
