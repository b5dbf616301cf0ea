"""The scheme ``none``: weights of the type that they are multiplied with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.quantization.base import (
    LinearShape,
    LinearWeights,
    Multiplier,
    Place,
    QuantizationScheme,
    empty_parameter,
)
from baton.models.quantization.registry import Quantization
from baton_kernels.activation import activated
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.rows import gated_product


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

    def pack(self) -> Multiplier:
        shape = self.shape
        packed = PackedWeight.of(
            self.weight, self.bias, gated=shape.gated, dtype=shape.dtype, activation=shape.activation
        )
        return self if packed is None else packed

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        product, activation = F.linear(x, self.weight, self.bias), self.shape.activation
        if activation is not None:
            activate = gated_product if self.shape.gated else activated
            product = activate(product, activation)
        return product if out_dtype is None else product.to(out_dtype)


class PlainScheme(QuantizationScheme):
    """The scheme of plain weights. Works on every device and with every type."""

    name: ClassVar[Quantization] = "none"

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def allocate(self, shape: LinearShape) -> PlainWeights:
        weight = empty_parameter(shape.num_rows, len(shape.inputs), dtype=shape.dtype)
        bias = empty_parameter(shape.num_rows, dtype=shape.dtype) if shape.bias else None
        return PlainWeights(shape, weight, bias)

    def tied(self, weight: nn.Parameter) -> PlainWeights:
        return PlainWeights(LinearShape.of(weight), weight, None)


PLAIN = PlainScheme()
