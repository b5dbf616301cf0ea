"""What a checkpoint says of its quantized weights. Imports no torch: a model's config is read without it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from baton_kernels.code_formats import CodeFormat, Rounding

ScaleType = Literal["float32", "float16", "fp8", "e8m0"]
"""The type in which scales of groups are kept: fp8 is e4m3, and e8m0 are powers of two."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """What is kept of the weight [outputs, inputs] of a matmul."""

    form: str
    """The name of the form in which the checkpoint has it: see ``forms.FORMS``."""
    code: CodeFormat
    group: int | None = None
    """The inputs that share a scale; None: all of them."""
    scale_rows: int | None = 1
    """The outputs that share a scale; None: all of a projection."""
    scale_type: ScaleType = "float32"
    zeros: bool = False
    """Whether groups have zero points."""
    factors: bool = False
    """Whether a projection has a factor besides its scales."""
    ordered: bool = False
    """Whether inputs are assigned to groups one by one."""
    rounding: Rounding = "none"
    """The rounding of activations, on devices with units for it."""

    def __str__(self) -> str:
        inputs = "row" if self.group is None else str(self.group)
        rows = "" if self.scale_rows == 1 else f"{self.scale_rows or 'all'}x"
        zeros = " with zero points" if self.zeros else ""
        ordered = " in the order of activations" if self.ordered else ""
        rounding = "" if self.rounding == "none" else f", activations {self.rounding}"
        return f"{self.code} by {rows}{inputs}{zeros}{ordered}{rounding}"


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names of modules, as in the checkpoint."""

    exact: frozenset[str] = frozenset()
    pattern: str = ""
    """A regular expression that matches other names from their start; "": none."""

    def match(self, name: str) -> bool:
        """Whether the module with this name is one of them."""
        return name in self.exact or (bool(self.pattern) and re.match(self.pattern, name) is not None)


EVERYTHING = ModuleNames(pattern=".")
HEAD = ModuleNames(frozenset({"lm_head"}))
"""The output head, which most methods leave plain."""


KV_SCALE_NAMES: tuple[tuple[str, str], ...] = (
    (".k_proj.k_scale", ".k_scale"),
    (".v_proj.v_scale", ".v_scale"),
    (".k_proj.output_scale", ".k_scale"),
    (".v_proj.output_scale", ".v_scale"),
    (".attn.k_scale", ".k_scale"),
    (".attn.v_scale", ".v_scale"),
)
"""Ends of the names of the scales of an attention layer's K and V in some checkpoints, and in others."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The modules that are kept in one way."""

    modules: ModuleNames
    spec: WeightSpec | None
    """None: their weights are plain."""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The quantized weights of a checkpoint: for each module the first rule that matches counts."""

    method: str
    rules: tuple[WeightRule, ...]
    kv_scales: bool = False
    """Whether attention layers may have scales of their K and V."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Ends of tensors' names in some checkpoints, and what they are in others."""
    unused: tuple[str, ...] = ()
    """Ends of the names of tensors that nothing is computed with."""

    def spec_of(self, *names: str) -> WeightSpec | None:
        """What is kept of the module with these names (one, or as many as it may have); None: plain
        weights."""
        for rule in self.rules:
            if any(map(rule.modules.match, names)):
                return rule.spec
        return None

    def tensor_name(self, name: str) -> str:
        """The name that a tensor has in most checkpoints."""
        renamed = self.renamed + KV_SCALE_NAMES if self.kv_scales else self.renamed
        for end, usual in renamed:
            if name.endswith(end):
                return name.removesuffix(end) + usual
        return name

    @property
    def description(self) -> str:
        """The method and the ways in which weights are kept: alike for workers that compute the same."""
        kept = sorted({str(rule.spec) for rule in self.rules if rule.spec is not None})
        return f"{self.method}: {'; '.join(kept)}"
