"""From a method's name to its drafter. A new method gets a line in ``_METHODS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from baton import hub
from baton.errors import ModelError
from baton.models.base import CausalLM
from baton.models.loader import LoadFormat, kv_block_bytes, load_model
from baton.speculation.config import Method, SpeculationConfig
from baton.speculation.draft_model import DraftModelDrafter
from baton.speculation.drafter import Drafter
from baton.speculation.ngram import NgramDrafter
from baton.text.errors import TokenizerError
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is sped up, and how it runs."""

    model: CausalLM
    path: Path
    """Its directory."""
    device: torch.device
    block_size: int
    max_num_batched_tokens: int
    load_format: LoadFormat


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


def _draft(config: SpeculationConfig, target: Target) -> DraftPlan:
    assert config.model is not None
    path = hub.resolve_model(config.model)
    _check_tokens(path, target.path)
    dtype = str(target.model.dtype).removeprefix("torch.")
    model = load_model(path, dtype, target.device, target.load_format)
    return DraftPlan(
        kv_block_bytes(model.config, target.block_size, model.dtype),
        lambda num_blocks: DraftModelDrafter(
            model, num_blocks, target.block_size, target.device, target.max_num_batched_tokens
        ),
    )


def _check_tokens(draft: Path, target: Path) -> None:
    """Token ids go from one model to the other, so they must mean the same. (The size of the embedding may
    differ: models of one family pad it differently.)"""
    try:
        ours, theirs = Tokenizer.from_dir(target), Tokenizer.from_dir(draft)
    except TokenizerError as error:
        raise ModelError(f"speculative_model {draft}: {error}") from error
    for token in range(max(ours.vocab_size, theirs.vocab_size)):
        if ours.token(token) != theirs.token(token):
            raise ModelError(
                f"speculative_model {draft}: its tokenizer is not that of {target}: token {token} is "
                f"{theirs.token(token)!r} there and {ours.token(token)!r} here"
            )


_METHODS: Mapping[Method, Callable[[SpeculationConfig, Target], DraftPlan]] = MappingProxyType(
    {"ngram": _ngram, "draft": _draft}
)
