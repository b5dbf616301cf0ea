"""From a method's name to its drafter. A new method gets a line in ``_METHODS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from baton.hub import resolve_model
from baton.models.base import CausalLM
from baton.speculation.config import Method, SpeculationConfig
from baton.speculation.drafter import Drafter
from baton.speculation.eagle import EagleDrafter, load_eagle
from baton.speculation.medusa import MedusaDrafter, load_medusa
from baton.speculation.ngram import NgramDrafter


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is sped up, and how it runs."""

    model: CausalLM
    path: Path
    """Its directory."""
    device: torch.device
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter whose weights are on the device, and that needs to know how much KV it may keep."""

    block_bytes: int
    """What the drafter keeps for each KV block of the target; 0: nothing."""
    build: Callable[[int], Drafter]
    """The drafter, with room for the tokens of so many blocks."""


def plan_drafter(config: SpeculationConfig, target: Target) -> DraftPlan | None:
    """Loads what the method needs. None for ``none``; ValueError or ModelError if it cannot be had."""
    if config.method == "none":
        return None
    plan = _METHODS.get(config.method)
    if plan is None:
        raise ValueError(
            f"speculative_method is {config.method!r}, which this version cannot do yet; "
            f"allowed: none, {', '.join(_METHODS)}"
        )
    return plan(config, target)


def _ngram(config: SpeculationConfig, target: Target) -> DraftPlan:
    return DraftPlan(0, lambda num_blocks: NgramDrafter(config.ngram_min, config.ngram_max))


def _medusa(config: SpeculationConfig, target: Target) -> DraftPlan:
    heads = load_medusa(weights_of(config, target), target.model, target.device)
    drafter = MedusaDrafter(heads, target.model, target.max_num_seqs)
    return DraftPlan(0, lambda num_blocks: drafter)


def _eagle(config: SpeculationConfig, target: Target) -> DraftPlan:
    layer, layer_config = load_eagle(weights_of(config, target), target.model, target.device)
    # Its KV is of a fixed size and taken at once, so that what is left for the pool is measured without it.
    drafter = EagleDrafter(layer, layer_config, target.model, target.max_num_seqs)
    return DraftPlan(0, lambda num_blocks: drafter)


def weights_of(config: SpeculationConfig, target: Target) -> Path:
    """The directory of what drafts: the one that is named or, as the demo model has them, the one of the
    method's name inside the model's own."""
    if config.model is not None:
        return resolve_model(config.model)
    own = target.path / config.method
    if not own.is_dir():
        raise ValueError(
            f"speculative_method {config.method} needs a speculative_model: {target.path} has none of its own"
        )
    return own


_METHODS: Mapping[Method, Callable[[SpeculationConfig, Target], DraftPlan]] = MappingProxyType(
    {"ngram": _ngram, "medusa": _medusa, "eagle": _eagle}
)
