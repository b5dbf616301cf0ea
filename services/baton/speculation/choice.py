"""From a method's name to its drafter. A new method gets a line in ``_METHODS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from baton.models.base import CausalLM
from baton.speculation.config import Method, SpeculationConfig
from baton.speculation.drafter import Drafter
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


_METHODS: Mapping[Method, Callable[[SpeculationConfig, Target], DraftPlan]] = MappingProxyType(
    {"ngram": _ngram}
)
