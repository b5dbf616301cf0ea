"""The interface of a quantization scheme: one way to keep the weights of matmuls.

The life of a layer's weights: ``QuantizationScheme.allocate`` reserves their memory when the layer is built,
each ``Place`` is loaded with one tensor of the checkpoint, ``LinearWeights.pack`` lays them out for the
kernels of their device, and the ``Multiplier`` that it returns multiplies from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from baton.models.quantization.registry import Quantization
from baton_kernels.activation import Activation


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialized memory for weights to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Memory, and the part of a tensor in the checkpoint that fills it."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    """The types that the tensor in the checkpoint may have."""

    tensor: Tensor
    source: tuple[slice, ...]
    """The part of each dimension of the checkpoint's tensor; slice(None): all of it."""

    def load(self, found: Tensor) -> None:
        """Fill the memory from ``found``, the checkpoint's whole tensor, of which no other part is read."""
        self.tensor.copy_(found[self.source])

    def direct(self, shape: torch.Size) -> Tensor | None:
        """The memory itself, if a whole tensor of this shape may be written there as it is."""
        return self.tensor if self.tensor.shape == shape else None


class PartRows(NamedTuple):
    """The rows of one projection."""

    name: str
    """The projection's name, among the projections that are computed together."""
    here: slice
    """The rows in the weights as they are allocated."""
    source: slice
    """The rows in the projection's tensors in the checkpoint."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A projection, or several of the same input that are computed as one matmul, or a rank's part of
    them."""

    inputs: range
    """The columns of the checkpoint's weights that are here."""
    parts: Mapping[str, range]
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
            yield PartRows(name, slice(start, start + len(rows)), slice(rows.start, rows.stop))
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
    def pack(self) -> Multiplier:
        """The loaded weights as the kernels of their device read them; these weights themselves if the
        kernels read them as they are. Otherwise these weights are not needed any more."""

    @abstractmethod
    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies like a ``Multiplier``, by plain torch, which takes any leading dimensions and may take
        long."""


class QuantizationScheme(ABC):
    """One way to keep the weights of matmuls. A scheme has no state."""

    name: ClassVar[Quantization]

    @abstractmethod
    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Checks that something multiplies such weights on the device with activations of the type.
        ModelError if not."""

    @abstractmethod
    def allocate(self, shape: LinearShape) -> LinearWeights:
        """Weights that are not yet loaded, on torch's current default device. ModelError if no kernel takes
        the shape."""

    @abstractmethod
    def tied(self, weight: nn.Parameter) -> LinearWeights:
        """A projection with a loaded weight [outputs, inputs], in which an embedding, too, looks up rows."""
