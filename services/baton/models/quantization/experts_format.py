"""The forms in which checkpoints hold the weights of experts. Imports no torch: a model's config is read
without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertsForm = Literal["separate", "fused", "transposed", "interleaved"]
"""separate: each expert's gate, up and down projections, [rows, inputs]. fused: [E, 2 * inner, hidden], the
gate's rows and then those of up, and [E, hidden, inner]. transposed: the same as [E, hidden, 2 * inner] and
[E, inner, hidden]. interleaved: transposed, with the gate's columns at even places and those of up at odd
ones. Biases of fused forms are [E, 2 * inner] and [E, hidden], in the same order."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the tensors of a layer's experts, relative to the MLP."""

    form: ExpertsForm = "separate"
    gate: str = "experts.{}.gate_proj"
    """The gate projection, with {} for the expert's number; separate only."""
    up: str = "experts.{}.up_proj"
    gate_up: str = ""
    """The one tensor of both projections; every form but separate."""
    down: str = "experts.{}.down_proj"
    """The down projection, with {} for the expert's number where the form is separate."""
    weight: str = ".weight"
    """The end of a weight's name."""
    bias: str = ".bias"
    """The end of a bias's name."""

    def end_of(self, kind: str) -> str:
        """The end of the name of another tensor of a projection: "weight", "bias", "weight_scale"."""
        match kind:
            case "weight":
                return self.weight
            case "bias":
                return self.bias
            case _ if self.weight:
                return f".{kind}"
            case _:
                return f"_{kind.removeprefix('weight_')}"


SEPARATE = ExpertNames()
NUMBERED = ExpertNames(gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")
"""Mixtral, MiniMax-M2, Phi-3.5-MoE."""
FUSED = ExpertNames("fused", gate_up="input_linear", down="output_linear")
"""Granite."""
GATE_UP = ExpertNames("fused", gate_up="experts.gate_up_proj", down="experts.down_proj", weight="")
"""Mistral Small 4."""
TRANSPOSED = ExpertNames("transposed", gate_up="experts.gate_up_proj", down="experts.down_proj", weight="")
"""Llama 4."""
INTERLEAVED = ExpertNames(
    "interleaved", gate_up="experts.gate_up_proj", down="experts.down_proj", weight="", bias="_bias"
)
"""gpt-oss."""


def rows_of(form: ExpertsForm, inner: int) -> tuple[slice, slice]:
    """The rows of the gate and of the up projection among the 2 * inner rows of both."""
    if form == "interleaved":
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, inner), slice(inner, 2 * inner)
