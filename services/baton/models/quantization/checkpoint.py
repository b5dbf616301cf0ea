"""The scheme of weights that are quantized in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import nn

from baton.models.quantization.apart import WeightsApart
from baton.models.quantization.base import (
    ExpertsShape,
    ExpertsWeights,
    LinearShape,
    LinearWeights,
    QuantizationScheme,
    Rows,
)
from baton.models.quantization.experts_format import ExpertNames
from baton.models.quantization.plain import PLAIN
from baton.models.quantization.quantized import QuantizedExperts, QuantizedWeights
from baton.models.quantization.registry import Quantization
from baton.models.quantization.weight_spec import QuantizedCheckpoint, WeightSpec
from baton.process.options import ModelError
from baton_kernels.code_formats import HALF_BYTE_FORMATS

NamesOf = Callable[[str], tuple[str, ...]]
"""A function from the name of a module to the names that it may have in a checkpoint."""


class CheckpointScheme(QuantizationScheme):
    """The weights as the checkpoint has them: quantized where its config says so, plain elsewhere."""

    name: Quantization = "auto"

    def __init__(self, checkpoint: QuantizedCheckpoint, names_of: NamesOf, path: str = "") -> None:
        """``path``: the module whose projections are meant."""
        self._checkpoint = checkpoint
        self._names_of = names_of
        self._path = path

    @property
    def description(self) -> str:
        return self._checkpoint.description

    def within(self, name: str) -> CheckpointScheme:
        return CheckpointScheme(self._checkpoint, self._names_of, self._below(name))

    def as_stored(self) -> CheckpointScheme:
        return self

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Finds nothing wrong: what no kernel takes is multiplied by plain torch."""

    def allocate(self, shape: LinearShape) -> LinearWeights:
        names = [self._below(part) for part in shape.parts]
        if shape.apart and len(runs := self._runs(shape.parts)) > 1:
            return WeightsApart([self.allocate(replace(shape, parts=parts)) for parts in runs])
        spec = self._spec_of_all(names)
        if spec is None:
            return PLAIN.allocate(shape)
        _check_groups(names[0], spec, shape.inputs)
        return QuantizedWeights(shape, spec)

    def allocate_experts(self, shape: ExpertsShape, names: ExpertNames) -> ExpertsWeights:
        halves = (names.gate, names.up) if shape.gated else (names.up,)
        if names.form != "separate":
            halves = (names.gate_up,)
        modules = [self._below(name.format(expert)) for name in halves for expert in shape.experts]
        gate_up = self._spec_of_all(modules)
        downs = [self._below(names.down.format(expert)) for expert in shape.experts]
        down = self._spec_of_all(downs)
        if gate_up is None and down is None:
            return PLAIN.allocate_experts(shape, names)
        if gate_up is None or down is None:
            raise _differ(modules[0], gate_up, downs[0], down)
        if gate_up.ordered or down.ordered:
            raise ModelError(
                f"quantization_config: desc_act of {modules[0]} is true; allowed for experts: false"
            )
        _check_groups(modules[0], gate_up, range(shape.hidden))
        _check_groups(downs[0], down, shape.inner)
        return QuantizedExperts(shape, gate_up, down)

    def tied(self, weight: nn.Parameter) -> LinearWeights:
        return PLAIN.tied(weight)

    def _runs(self, parts: Mapping[str, Rows]) -> list[dict[str, Rows]]:
        """The parts in order, those together that follow each other and are kept in the same way."""
        runs = groupby(parts.items(), lambda part: self._spec(self._below(part[0])))
        return [dict(run) for _, run in runs]

    def _below(self, name: str) -> str:
        return ".".join(part for part in (self._path, name) if part)

    def _spec_of_all(self, modules: list[str]) -> WeightSpec | None:
        """What is kept of modules that are computed as one."""
        first, *others = modules
        spec = self._spec(first)
        for other in others:
            if (found := self._spec(other)) != spec:
                raise _differ(first, spec, other, found)
        return spec

    def _spec(self, module: str) -> WeightSpec | None:
        return self._checkpoint.spec_of(*self._names_of(module))


def _differ(name: str, spec: WeightSpec | None, other: str, found: WeightSpec | None) -> ModelError:
    return ModelError(
        f"quantization_config: {name} is {spec or 'plain'}, {other} is {found or 'plain'}; allowed for "
        "weights that are computed as one: the same"
    )


def _check_groups(name: str, spec: WeightSpec, inputs: range) -> None:
    """Checks that groups end where the inputs of a rank do."""
    group = spec.group or (2 if spec.code in HALF_BYTE_FORMATS else 1)
    if inputs.start % group or inputs.stop % group:
        raise ModelError(
            f"quantization_config: {name} has groups of {group} inputs; allowed for inputs {inputs.start} to "
            f"{inputs.stop}: groups that divide them (--tensor-parallel-size decides which a rank has)"
        )
    if spec.ordered and inputs.start:
        raise ModelError(
            f"quantization_config: desc_act of {name} is true; allowed for a rank's part of the inputs: false"
        )
