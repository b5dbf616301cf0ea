"""Weights that are kept as codes: loaded as they are in a checkpoint, or rounded as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from baton.models.quantization.base import (
    ExpertMatrix,
    ExpertsMultiplier,
    ExpertsShape,
    ExpertsWeights,
    Index,
    LinearShape,
    LinearWeights,
    Multiplier,
    Place,
    empty_parameter,
)
from baton.models.quantization.forms import stored_weight
from baton.models.quantization.stored import MatrixShape, Slot, StoredPlace
from baton.models.quantization.weight_spec import WeightSpec
from baton.process.options import ModelError
from baton_kernels.code_formats import HALF_BYTE_FORMATS, CodeFormat
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.expert_tensors import QuantizedExpertTensors
from baton_kernels.quantized import QuantizedWeight, halves, joined
from baton_kernels.quantized_linear import (
    multiply_quantized,
    multiply_quantized_experts,
    warm_up,
    warm_up_experts,
)

CODE_TYPES: Mapping[CodeFormat, torch.dtype] = MappingProxyType(
    {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8, "fp4": torch.uint8}
)
_SCALE_TYPES = MappingProxyType(
    {
        "float32": torch.float32,
        "float16": torch.float16,
        "fp8": torch.float8_e4m3fn,
        "e8m0": torch.float8_e8m0fnu,
    }
)
_RMS: Mapping[CodeFormat, float] = MappingProxyType({"int8": 73.9, "fp8": 125.6, "int4": 4.6, "fp4": 2.9})
"""The root of the mean square of codes that are drawn evenly."""


class Slots:
    """The tensors of a quantized weight that is being loaded: of one projection, of several that are computed
    as one, or of all experts' matrices of a kind."""

    def __init__(
        self, spec: WeightSpec, rows: int, inputs: int, parts: Sequence[str], experts: int | None = None
    ) -> None:
        """``parts``: the names of the projections that the rows are."""
        self.spec = spec
        self.inputs = inputs
        self.parts = parts
        every = () if experts is None else (experts,)
        group = spec.group or inputs
        columns = inputs // 2 if spec.code in HALF_BYTE_FORMATS else inputs
        shapes: dict[Slot, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((rows, columns), CODE_TYPES[spec.code]),
            "scales": ((rows, inputs // group), _SCALE_TYPES[spec.scale_type]),
        }
        if spec.zeros:
            zeros = torch.uint8 if spec.code == "int4" else torch.int8
            shapes["zeros"] = ((rows, inputs // group), zeros)
        if spec.factors:
            shapes["factors"] = ((rows,), torch.float32)
        if spec.ordered:
            shapes["groups"] = ((len(parts), inputs), torch.int32)
        if spec.rounding == "fp8-tensor":
            shapes["input_scale"] = ((len(parts),), torch.float32)
        self.tensors = {
            slot: empty_parameter(*every, *shape, dtype=dtype) for slot, (shape, dtype) in shapes.items()
        }

    def places(
        self, part: int, rows: slice, source: tuple[Index, slice], expert: int | None = None
    ) -> dict[str, Place]:
        """The places of a projection's tensors, by the ends of their names in the checkpoint. ``rows``: its
        rows here; ``source``: the part of the checkpoint's weight [outputs, inputs] that they are."""
        matrix = MatrixShape(rows.stop - rows.start, self.inputs)
        found = dict[str, Place]()
        for name, (slot, form) in stored_weight(self.spec).items():
            tensor = self.tensor(slot)
            if slot is not None:
                tensor = tensor if expert is None else tensor[expert]
                tensor = tensor[part if slot in ("groups", "input_scale") else rows]
            neutral = self._neutral(slot, tensor.device)
            found[name] = StoredPlace(tensor, source, form, matrix, neutral, self.spec)
        return found

    def tensor(self, slot: Slot | None) -> Tensor:
        """The tensor of the slot; an empty one for no slot."""
        return self.tensors["codes"].new_empty(0) if slot is None else self.tensors[slot]

    def _neutral(self, slot: Slot | None, device: torch.device) -> Tensor | None:
        """The numbers that make drawn weights' products as large as their inputs; None: codes are drawn."""
        size = self.inputs**-0.5 / _RMS[self.spec.code]
        match slot:
            case "codes":
                return None
            case "groups":
                assert self.spec.group is not None
                return torch.arange(self.inputs, device=device) // self.spec.group
            case "scales":
                number = 1.0 if self.spec.factors else size
            case "factors":
                number = size
            case "zeros":
                number = 8.0 if self.spec.code == "int4" else 0.0
            case "input_scale" | None:
                number = 1.0
        return torch.full((), number, device=device)

    def weight(self) -> QuantizedWeight:
        """The weight, once its tensors are loaded."""
        tensors = self.tensors
        scale = tensors.get("input_scale")
        weight = QuantizedWeight(
            self.spec.code,
            tensors["codes"],
            tensors["scales"],
            tensors.get("zeros"),
            tensors.get("factors"),
            rounding=self.spec.rounding,
            input_scale=None if scale is None else scale.max(),
        )
        groups = tensors.get("groups")
        return weight if groups is None else in_group_order(weight, groups, self.parts)


def in_group_order(weight: QuantizedWeight, groups: Tensor, parts: Sequence[str]) -> QuantizedWeight:
    """The weight with its columns sorted by their groups. ``groups`` [projections, inputs]: the group of each
    input, the same for all projections that are computed as one, whose names are ``parts``. ModelError for
    other groups."""
    own, *others = groups.long()
    for name, other in zip(parts[1:], others, strict=True):
        if not torch.equal(own, other):
            raise ModelError(
                f"tensor {name}.g_idx is not {parts[0]}.g_idx; allowed for projections that are computed as "
                "one: the same groups"
            )
    number = weight.scales.shape[-1]
    if own.min() < 0 or own.max() >= number or (own.bincount(minlength=number) != weight.group).any():
        raise ModelError(
            f"tensor {parts[0]}.g_idx has a group of other than {weight.group} inputs; allowed: {number} "
            "groups of that size"
        )
    order = own.argsort(stable=True)
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        return weight
    codes = weight.codes
    if weight.format in HALF_BYTE_FORMATS:
        codes = joined(halves(codes)[..., order])
    else:
        codes = codes[..., order]
    return replace(weight, codes=codes, order=order)


class QuantizedWeights(LinearWeights):
    """Codes [outputs, inputs] with their scales, and a plain bias."""

    def __init__(self, shape: LinearShape, spec: WeightSpec, modules: Sequence[str] = ()) -> None:
        """``modules``: the names of the projections, for errors; (): as the shape has them."""
        self.shape = shape
        self.slots = Slots(spec, shape.num_rows, len(shape.inputs), modules or list(shape.parts))
        self.bias = empty_parameter(shape.num_rows, dtype=shape.dtype) if shape.bias else None
        self._weight: QuantizedWeight | None = None

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        found = dict[str, nn.Parameter](self.slots.tensors.items())
        return found if self.bias is None else found | {"bias": self.bias}

    def places(self) -> Mapping[str, Mapping[str, Place]]:
        found: dict[str, Mapping[str, Place]] = {}
        for number, (name, rows, source) in enumerate(self.shape.part_rows()):
            tensors = self.tensor_places(number, rows, (source, self.shape.columns))
            bias = {} if self.bias is None else {"bias": Place(self.bias[rows], (source,))}
            found[name] = {**tensors, **bias}
        return found

    def tensor_places(self, part: int, rows: slice, source: tuple[Index, slice]) -> Mapping[str, Place]:
        """The places of the tensors of one projection but its bias: see ``Slots.places``."""
        return self.slots.places(part, rows, source)

    def plain(self) -> Tensor:
        return self.slots.weight().dequantized().to(self.shape.dtype)

    def pack(self) -> Multiplier:
        weight, shape = self.slots.weight(), self.shape
        packed = PackedWeight.of(
            weight,
            self.bias,
            gated=shape.gated,
            dtype=shape.dtype,
            activation=shape.activation,
            is_last=True,
        )
        if packed is not None:
            return packed
        self._weight = weight
        for out_dtype in (shape.dtype, torch.float32):  # heads yield logits in float32
            warm_up(
                weight,
                self.bias,
                dtype=shape.dtype,
                gated=shape.gated,
                activation=shape.activation,
                out_dtype=out_dtype,
            )
        return self

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        weight = self._weight or self.slots.weight()
        gated, activation = self.shape.gated, self.shape.activation
        return multiply_quantized(
            x, weight, self.bias, gated=gated, activation=activation, out_dtype=out_dtype
        )


class QuantizedExperts(ExpertsWeights):
    """Codes of experts' matrices with their scales, and plain biases."""

    def __init__(self, shape: ExpertsShape, gate_up: WeightSpec, down: WeightSpec) -> None:
        super().__init__(shape)
        experts, inner = len(shape.experts), len(shape.inner)
        halves = ("gate", "up") if shape.gated else ("up",)
        self.slots: dict[ExpertMatrix, Slots] = {
            "gate_up": Slots(gate_up, shape.gate_up_rows, shape.hidden, halves, experts),
            "down": Slots(down, shape.hidden, inner, ("down",), experts),
        }

    @property
    def matrices(self) -> Mapping[str, nn.Parameter]:
        return {
            f"{matrix}_{slot}": tensor
            for matrix, slots in self.slots.items()
            for slot, tensor in slots.tensors.items()
        }

    @property
    def holds_transposed(self) -> bool:
        return False

    def matrix_places(
        self, name: ExpertMatrix, expert: int, rows: slice, source: tuple[slice, slice]
    ) -> Mapping[str, Place]:
        part = int(name == "gate_up" and rows.start > 0)
        return self.slots[name].places(part, rows, source, expert)

    def matrix_tensor(self, name: ExpertMatrix, kind: str) -> Tensor:
        slots = self.slots[name]
        return slots.tensor(stored_weight(slots.spec)[kind].slot)

    def pack(self) -> ExpertsMultiplier:
        shape, biases = self.shape, (self.gate_up_bias, self.down_bias)
        packed = PackedExperts.of(*self._weights, *biases, activation=shape.activation, dtype=shape.dtype)
        return self if packed is None else packed

    @property
    def _weights(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        return self.slots["gate_up"].weight(), self.slots["down"].weight()

    def multiply(self, x: Tensor, experts: Tensor, weights: Tensor, weighs_input: bool) -> Tensor:
        return multiply_quantized_experts(x, experts, weights, self._tensors, weighs_input)

    def warm_up(self, top_k: int, weighs_input: bool) -> None:
        warm_up_experts(self._tensors, top_k, weighs_input)

    @property
    def _tensors(self) -> QuantizedExpertTensors:
        biases = self.gate_up_bias, self.down_bias
        return QuantizedExpertTensors(*self._weights, *biases, self.shape.activation, self.shape.dtype)
