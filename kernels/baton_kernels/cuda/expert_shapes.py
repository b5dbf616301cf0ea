"""The tile sizes of the kernels of experts, by the sizes of a model and the number of pairs of a step.

A pair is a token and one of its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from baton_kernels.cuda.shapes import MIN_ARCH, MIN_ROWS, Device, next_power_of_two
from baton_kernels.cuda.tuned import NONE, Tiling, TuningError, tilings_of
from baton_kernels.cuda.weight_tiles import WeightOperand
from baton_kernels.expert_tensors import ExpertTensors, QuantizedExpertTensors

MOST_ROWS = 128
"""Most pairs of a tile."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The properties that the kernels of experts are compiled for.

    Of a :class:`Tiling`, ``rows`` are pairs of one expert and ``tile`` columns of the result. Tiles are as
    large as registers and shared memory allow without spilling, which ``python -m loadtest.kernels
    --compile`` shows.
    """

    hidden: int
    inner: int
    experts: int
    dtype: torch.dtype
    arch: int
    tuned: Mapping[str, Tiling] = field(default_factory=dict)
    """Tuned tile sizes, which override those chosen here, by :meth:`name`."""
    quantized: bool = False
    """Whether weights are, whose numbers take registers beside the sums."""

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"experts of {self.dtype}: allowed are float32, bfloat16 and float16")
        if self.arch < MIN_ARCH:
            raise ValueError(f"compute capability is {self.arch / 10}: at least {MIN_ARCH / 10}")

    @classmethod
    def of(cls, tensors: ExpertTensors | QuantizedExpertTensors, device: Device) -> ExpertShape:
        experts, hidden, inner = tensors.down.shape
        quantized = isinstance(tensors, QuantizedExpertTensors)
        tuned = NONE if quantized else tilings_of(device.name)
        return cls(hidden, inner, experts, tensors.dtype, device.arch, tuned, quantized)

    @property
    def exact(self) -> bool:
        """Whether products are float32's own, outside of the tensor cores."""
        return self.dtype == torch.float32

    @property
    def depth(self) -> int:
        """Numbers of a row of a tile that are multiplied at a time."""
        return 16 if self.exact else 64

    @property
    def most_few(self) -> int:
        """Most pairs that are multiplied one by one. As long as there are no more pairs than experts, few
        share an expert, and a tile of 16 rows would be mostly nothing. Weights of an expert that is shared
        come from the second-level cache."""
        return self.experts

    def few_depth(self, size: int) -> int:
        """Numbers of a row of ``size`` that a program of few pairs takes at a time."""
        return min(512 if self.exact else 1024, max(128, next_power_of_two(size)))

    def rows(self, pairs: int) -> int:
        """Pairs of a tile: twice the mean number of an expert's pairs, that most experts are read once."""
        return min(MOST_ROWS, max(MIN_ROWS, next_power_of_two(max(1, 2 * pairs // self.experts))))

    def name(self, kernel: str, rows: int) -> str:
        """The name of ``gate_up`` or ``down`` for tiles of ``rows`` pairs."""
        return (
            f"{kernel} of {rows} rows, hidden {self.hidden}, inner {self.inner}, {self.experts} experts, "
            f"{str(self.dtype).removeprefix('torch.')}, arch {self.arch}"
        )

    def gate_up(self, rows: int) -> Tiling:
        """The tiling of the first product, of which ``tile`` are columns of gate and of up each. TuningError
        if a tuned one does not fit."""
        return self._tuned("gate_up", self.untuned_gate_up(rows))

    def down(self, rows: int) -> Tiling:
        """The tiling of the second product. TuningError if a tuned one does not fit."""
        return self._tuned("down", self.untuned_down(rows))

    def untuned_gate_up(self, rows: int) -> Tiling:
        if self.exact:
            return Tiling(rows, 32, warps=8, stages=2)
        if rows < 64:
            return Tiling(rows, 64, warps=4, stages=4)
        # From 9.0 on the tensor cores read their operands from shared memory. Older ones take registers.
        large = self.arch >= 90
        wide = not self.quantized and (large or rows == 64)
        return Tiling(rows, 128 if wide else 64, warps=8, stages=4 if large else 3)

    def untuned_down(self, rows: int) -> Tiling:
        if self.exact:
            return Tiling(rows, 64, warps=8, stages=2)
        tile = 64 if self.quantized and rows < MOST_ROWS else 128
        return Tiling(rows, tile, warps=4 if rows < 64 else 8, stages=4 if self.arch >= 90 else 3)

    def _tuned(self, kernel: str, chosen: Tiling) -> Tiling:
        tuned = self.tuned.get(self.name(kernel, chosen.rows), chosen)
        if tuned.rows != chosen.rows:  # both products go through the same tiles
            raise TuningError(f"{kernel} is tuned to {tuned.rows} rows; allowed: {chosen.rows}")
        return tuned


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """The experts of a step's tokens. ValueError if a tensor is not as the kernels read it."""

    x: Tensor
    """[T, hidden], in the order of the first weight's codes."""
    experts: Tensor
    """[T, k] int32."""
    weights: Tensor
    """[T, k] float32."""
    tensors: ExpertTensors | QuantizedExpertTensors
    weighs_input: bool
    shape: ExpertShape

    def __post_init__(self) -> None:
        tensors = self.tensors
        plain = {"x": self.x}
        if isinstance(tensors, ExpertTensors):
            plain |= {"gate_up": tensors.gate_up, "down": tensors.down}
        for name, tensor in plain.items():
            if tensor.stride(-1) != 1:
                raise ValueError(f"rows of {name} must be contiguous, not strided by {tensor.stride(-1)}")
            if tensor.dtype != self.shape.dtype:
                raise ValueError(f"{name} is {tensor.dtype}; allowed: {self.shape.dtype}, as down is")
        if (self.experts.dtype, self.weights.dtype) != (torch.int32, torch.float32):
            raise ValueError(
                f"experts {self.experts.dtype}, weights {self.weights.dtype}; allowed: int32, float32"
            )
        for small in (self.experts, self.weights, tensors.gate_up_bias, tensors.down_bias):
            if small is not None and not small.is_contiguous():
                raise ValueError(
                    f"experts, weights and biases must be contiguous, not {small.stride()} apart"
                )

    @property
    def gate_up(self) -> WeightOperand:
        """The first product's weight, as kernels take it."""
        return WeightOperand.of(self.tensors.gate_up, self.shape.arch)

    @property
    def down(self) -> WeightOperand:
        return WeightOperand.of(self.tensors.down, self.shape.arch)

    @property
    def pairs(self) -> int:
        return self.experts.numel()

    @property
    def x_stride(self) -> int:
        """The numbers from row to row: of one row torch may say anything."""
        return self.x.stride(0) if len(self.x) > 1 else self.x.shape[1]


def token_counts(shape: ExpertShape, top_k: int) -> list[int]:
    """Numbers of tokens that together launch every kernel that any number does."""
    found: dict[int, int] = {}
    tokens = 1
    while True:
        pairs = tokens * top_k
        kind = 0 if pairs <= shape.most_few else shape.rows(pairs)
        found.setdefault(kind, tokens)
        if kind == MOST_ROWS:
            return list(found.values())
        tokens += 1


@cache
def device_of(device: torch.device) -> Device:
    """The properties of a device. Asked for once: every layer of every step wants them."""
    return Device.of(device)
