"""The interface of a quantization scheme: one way to keep the weights of matmuls.

The life of a layer's weights: ``QuantizationScheme.allocate`` reserves their memory when the layer is built,
each ``Place`` is loaded with one tensor of the checkpoint, ``LinearWeights.pack`` lays them out for the
kernels of their device, and the ``Multiplier`` that it returns multiplies from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from baton.models.quantization.experts_format import ExpertNames, ExpertsForm, rows_of
from baton.models.quantization.registry import Quantization
from baton.models.quantization.weight_spec import WeightSpec
from baton_kernels.activation_kind import Activation

Rows: TypeAlias = range | tuple[int, ...]
"""Rows of a tensor in the checkpoint, in this order."""
Index: TypeAlias = slice | Tensor
"""A part of one dimension of a tensor in the checkpoint: a slice, or the places [n] int64."""


def index_of(rows: Rows) -> Index:
    """The rows as an index."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else torch.tensor(rows, device="cpu")


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialized memory for weights to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Memory, and the part of a tensor in the checkpoint that fills it."""

    tensor: Tensor
    source: tuple[Index, ...]
    """The part of each dimension of the checkpoint's tensor; slice(None): all of it."""

    def load(self, found: Tensor) -> None:
        """Fill the memory from ``found``, the checkpoint's whole tensor, of which no other part is read.
        ValueError for numbers that are not allowed."""
        self.tensor.copy_(found[self.source])

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types that the tensor in the checkpoint may have."""
        return torch.float32, torch.bfloat16, torch.float16

    @property
    def is_optional(self) -> bool:
        """Whether a checkpoint may be without the tensor: the memory then has what it had before."""
        return False

    @property
    def shape(self) -> torch.Size:
        """The shape of the checkpoint's tensor, if this is a place in a whole model."""
        return self.tensor.shape

    @property
    def spec(self) -> WeightSpec | None:
        """What is kept of the weight that the tensor is of; None: plain numbers."""
        return None

    @property
    def num_matrices(self) -> int:
        """The weights whose numbers, or codes, the tensor has; 0: it has their scales, or the like."""
        return 1

    def fits(self, shape: torch.Size, expected: torch.Size) -> bool:
        """Whether a tensor of this shape may be loaded where one of the shape ``expected`` is."""
        return shape == expected

    def draw(self, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> None:
        """Fill the memory with the part that is here of a matrix that is drawn whole, of this shape and type,
        scaled so that activations neither fade nor blow up."""
        direct = self.direct(shape)
        drawn = self.tensor.new_empty(shape, dtype=dtype) if direct is None else direct
        drawn.normal_(std=shape[1] ** -0.5, generator=generator)
        if direct is None:
            self.load(drawn)

    def direct(self, shape: torch.Size) -> Tensor | None:
        """The memory itself, if a whole tensor of this shape may be written there as it is."""
        in_order = all(isinstance(part, slice) for part in self.source) and self.tensor.is_contiguous()
        return self.tensor if in_order and self.tensor.shape == shape else None

    def make_neutral(self, norm_offset: float) -> None:
        """Fill a vector of factors with 1, less what is added to norms' weights."""
        self.tensor.fill_(1 - norm_offset)


class FactorPlace(Place):
    """Memory of factors to which nothing is added."""

    def make_neutral(self, norm_offset: float) -> None:
        super().make_neutral(0)


class PartRows(NamedTuple):
    """The rows of one projection."""

    name: str
    """The projection's name, among the projections that are computed together."""
    here: slice
    """The rows in the weights as they are allocated."""
    source: Index
    """The rows in the projection's tensors in the checkpoint."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A projection, or several of the same input that are computed as one matmul, or a rank's part of
    them."""

    inputs: range
    """The columns of the checkpoint's weights that are here."""
    parts: Mapping[str, Rows]
    """Each projection's name in the checkpoint ("": the layer's own) -> the rows of the checkpoint's weights
    that are here. The outputs follow each other in this order."""
    dtype: torch.dtype
    """The type of the activations that are multiplied with the weights, and of the bias."""
    bias: bool = False
    gated: bool = False
    """Whether the parts are two of equal size, and the product is the activated first's times the second's.
    Such a shape has an activation."""
    activation: Activation | None = None
    """The activation of the outputs, or of the gate; None: none."""
    apart: bool = False
    """Whether the parts may be multiplied one by one where a checkpoint keeps them in different ways."""

    def __post_init__(self) -> None:
        if self.gated and self.activation is None:
            raise ValueError("activation is None; allowed for gated projections: an Activation")

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.parts.values()))

    @property
    def columns(self) -> slice:
        """``inputs`` as a slice of the checkpoint's columns."""
        return slice(self.inputs.start, self.inputs.stop)

    def part_rows(self) -> Iterator[PartRows]:
        """The rows of each part, in order."""
        start = 0
        for name, rows in self.parts.items():
            yield PartRows(name, slice(start, start + len(rows)), index_of(rows))
            start += len(rows)

    @classmethod
    def of(cls, weight: Tensor) -> LinearShape:
        """One whole projection with this weight [outputs, inputs] and no bias."""
        outputs, inputs = weight.shape
        return cls(range(inputs), {"": range(outputs)}, weight.dtype)


class Multiplier(Protocol):
    """Weights that are ready to be multiplied with."""

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, inputs] -> [T, outputs], of ``out_dtype`` (None: the type of x), bias and gate included."""


class LinearWeights(ABC):
    """The weights of one ``LinearShape`` from their allocation until they are packed."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the layer registers as its own."""

    @abstractmethod
    def places(self) -> Mapping[str, Mapping[str, Place]]:
        """Name of each part -> name of each tensor that the checkpoint has of it ("weight") -> its place.
        Loaded in any order, the places fill everything once."""

    @abstractmethod
    def plain(self) -> Tensor:
        """The loaded weight [outputs, inputs] as plain numbers, of the type of the activations."""

    @abstractmethod
    def pack(self) -> Multiplier:
        """The loaded weights as the kernels of their device read them; these weights themselves if the
        kernels read them as they are. Otherwise what these weights held is lost: their memory is given back
        while they are packed."""

    @abstractmethod
    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies like a ``Multiplier``, by plain torch, which takes any leading dimensions and may take
        long."""


class ExpertPart(NamedTuple):
    """A matrix, or bias, in a tensor of all experts."""

    expert: int
    """The number of its expert."""
    half: int
    """The number of its projection, among those in one tensor."""
    place: Place


@dataclass(frozen=True, slots=True)
class FusedPlace(Place):
    """Memory that a tensor of all experts fills, one part after the other. ``source`` has no meaning."""

    form: ExpertsForm
    projections: int
    """1, or 2: the gate and the up projection are in one tensor."""
    parts: tuple[ExpertPart, ...]
    is_transposed: bool
    """Whether each expert's matrix is [inputs, rows]."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.parts[0].place.dtypes

    @property
    def shape(self) -> torch.Size:
        experts, part = len(self.parts) // self.projections, self.parts[0].place.shape
        if not part:
            return torch.Size((experts,))
        rows, *rest = part
        shape = torch.Size((experts, rows * self.projections, *rest))
        return torch.Size((shape[0], shape[2], shape[1])) if self.is_transposed else shape

    @property
    def spec(self) -> WeightSpec | None:
        return self.parts[0].place.spec

    @property
    def num_matrices(self) -> int:
        return sum(part.place.num_matrices for part in self.parts)

    def load(self, found: Tensor) -> None:
        if found.dim() == 1:  # a number of each expert
            for expert, _, place in self.parts:
                place.load(found[expert])
            return
        if self.is_transposed:
            found = found.mT
        rows = rows_of(self.form, found.shape[1] // 2) if self.projections == 2 else (slice(None),)
        for expert, half, place in self.parts:
            place.load(found[expert][rows[half]])

    def direct(self, shape: torch.Size) -> None:
        return None

    def draw(self, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> None:
        _, *matrix = (shape[0], shape[2], shape[1]) if self.is_transposed else shape
        each = torch.Size((matrix[0] // self.projections, *matrix[1:]))
        for part in self.parts:
            part.place.draw(each, dtype, generator)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The MLPs of a layer's experts, or a rank's part of each."""

    experts: range
    """The numbers in the checkpoint of the experts that are here."""
    hidden: int
    inner: range
    """The rows of each gate and up projection in the checkpoint, and the columns of each down projection,
    that are here."""
    dtype: torch.dtype
    """The type of the activations that are multiplied with the weights, and of biases."""
    activation: Activation
    bias: bool = False
    """Whether the gate and up projections have biases."""
    down_bias: bool = False
    """Whether the down projections' biases are here: one rank adds them."""
    gated: bool = True
    """Whether the experts have gates."""

    @property
    def gate_up_rows(self) -> int:
        """The rows of an expert's gate and up projections, or of its up projection alone."""
        return (1 + self.gated) * len(self.inner)


ExpertMatrix: TypeAlias = Literal["gate_up", "down"]
"""The matrices of an expert: those of its gate and up projections together, and that of the other."""


class ExpertsMultiplier(Protocol):
    """Experts that are ready to compute."""

    def multiply(self, x: Tensor, experts: Tensor, weights: Tensor, weighs_input: bool) -> Tensor:
        """See ``baton_kernels.experts.loop_over_experts``; x [T, hidden] -> [T, hidden]."""


class ExpertsWeights(ABC):
    """The weights of one ``ExpertsShape`` from their allocation until they are packed."""

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape = shape
        experts = len(shape.experts)
        self.gate_up_bias = self.down_bias = None
        if shape.bias:
            self.gate_up_bias = empty_parameter(experts, shape.gate_up_rows, dtype=shape.dtype)
        if shape.down_bias:
            self.down_bias = empty_parameter(experts, shape.hidden, dtype=shape.dtype)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the layer registers as its own."""
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return {
            **self.matrices,
            **{name: parameter for name, parameter in biases.items() if parameter is not None},
        }

    @property
    @abstractmethod
    def matrices(self) -> Mapping[str, nn.Parameter]:
        """All parameters but the biases."""

    @abstractmethod
    def matrix_places(
        self, name: ExpertMatrix, expert: int, rows: slice, source: tuple[slice, slice]
    ) -> Mapping[str, Place]:
        """The places of some rows of the matrix of one of the experts here, by the names of the tensors that
        the checkpoint has of it ("weight"). ``source`` is the part of the checkpoint's matrix, [rows,
        inputs], that they are."""

    @abstractmethod
    def matrix_tensor(self, name: ExpertMatrix, kind: str) -> Tensor:
        """The memory [E, ...] of the matrices of all experts here that the checkpoint's tensors of a kind
        ("weight") fill."""

    @property
    def holds_transposed(self) -> bool:
        """Whether tensors of all experts are transposed where their form says so; packed codes are not."""
        return True

    @abstractmethod
    def pack(self) -> ExpertsMultiplier:
        """The loaded weights as the kernels of their device read them; these weights themselves if the
        kernels read them as they are. Otherwise these weights are not needed any more."""

    @abstractmethod
    def multiply(self, x: Tensor, experts: Tensor, weights: Tensor, weighs_input: bool) -> Tensor:
        """Multiplies like an ``ExpertsMultiplier``, with the weights as they are."""

    @abstractmethod
    def warm_up(self, top_k: int, weighs_input: bool) -> None:
        """Launches every kernel that ``multiply`` launches for so many experts of a token, on a device whose
        kernels read the weights as they are."""

    def places(self, names: ExpertNames) -> dict[str, Place]:
        """Name of each tensor that the checkpoint has of the experts -> its place. Loaded in any order, the
        places fill everything once."""
        if names.form == "separate":
            stems = {"gate": names.gate, "up": names.up, "down": names.down}
            return {
                stems[projection].format(expert) + names.end_of(kind): place
                for here, expert in enumerate(self.shape.experts)
                for projection, places in self._places(here).items()
                for kind, place in places.items()
            }
        both = ("gate", "up") if self.shape.gated else ("up",)
        return {**self._fused(names, names.gate_up, both), **self._fused(names, names.down, ("down",))}

    def _fused(self, names: ExpertNames, stem: str, projections: tuple[str, ...]) -> dict[str, Place]:
        """The places of the tensors that the checkpoint has of these projections of all experts."""
        by_expert = [self._places(here) for here in range(len(self.shape.experts))]
        transposed = names.form in ("transposed", "interleaved") and self.holds_transposed
        found = dict[str, Place]()
        for kind in by_expert[0][projections[0]]:
            parts = tuple(
                ExpertPart(expert, half, by_expert[here][projection][kind])
                for here, expert in enumerate(self.shape.experts)
                for half, projection in enumerate(projections)
            )
            tensor = self._fused_tensor("down" if projections == ("down",) else "gate_up", kind)
            is_matrix = kind != "bias" and transposed
            found[stem + names.end_of(kind)] = FusedPlace(
                tensor, (), names.form, len(projections), parts, is_matrix
            )
        return found

    def _fused_tensor(self, name: ExpertMatrix, kind: str) -> Tensor:
        if kind != "bias":
            return self.matrix_tensor(name, kind)
        bias = self.down_bias if name == "down" else self.gate_up_bias
        assert bias is not None
        return bias

    def _places(self, expert: int) -> dict[str, dict[str, Place]]:
        """Name of each projection of one of the experts here -> name of each of its tensors -> its place."""
        all_of, inner = slice(0, self.shape.hidden), slice(self.shape.inner.start, self.shape.inner.stop)
        size = len(self.shape.inner)
        halves = {"gate": slice(0, size), "up": slice(size, 2 * size)}
        if not self.shape.gated:
            halves = {"up": slice(0, size)}
        found: dict[str, dict[str, Place]] = {
            name: {**self.matrix_places("gate_up", expert, rows, (inner, all_of))}
            for name, rows in halves.items()
        }
        found["down"] = {**self.matrix_places("down", expert, all_of, (all_of, inner))}
        if self.gate_up_bias is not None:
            for name, rows in halves.items():
                found[name]["bias"] = Place(self.gate_up_bias[expert, rows], (inner,))
        if self.down_bias is not None:
            found["down"]["bias"] = Place(self.down_bias[expert], (all_of,))
        return found


class QuantizationScheme(ABC):
    """One way to keep the weights of matmuls. A scheme has no state."""

    name: Quantization

    @property
    def description(self) -> str:
        """What workers compare that hand over KV to each other: "" for plain weights."""
        return "" if self.name == "none" else self.name

    def within(self, name: str) -> QuantizationScheme:
        """The scheme of the modules below the one with this name; of that module itself, if it is one
        projection."""
        return self

    @abstractmethod
    def as_stored(self) -> QuantizationScheme:
        """The scheme of a weight that is computed with as plain numbers, whatever the checkpoint keeps."""

    @abstractmethod
    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Checks that something multiplies such weights on the device with activations of the type.
        ModelError if not."""

    @abstractmethod
    def allocate(self, shape: LinearShape) -> LinearWeights:
        """Weights that are not yet loaded, on torch's current default device. ModelError if no kernel takes
        the shape."""

    @abstractmethod
    def allocate_experts(self, shape: ExpertsShape, names: ExpertNames) -> ExpertsWeights:
        """Experts with these names in the checkpoint that are not yet loaded, on torch's current default
        device. ModelError if no kernel takes the shape."""

    @abstractmethod
    def tied(self, weight: nn.Parameter) -> LinearWeights:
        """A projection with a loaded weight [outputs, inputs], in which an embedding, too, looks up rows."""
