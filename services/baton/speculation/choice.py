"""The choice of a drafter by its method's name. A new method gets a line in ``_METHODS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from baton import hub
from baton.models.base import CausalLM
from baton.models.config import LoadFormat, ModelConfig
from baton.models.loader import kv_block_bytes, load_model
from baton.models.quantization.registry import Quantization
from baton.process.options import ModelError
from baton.speculation.config import Method, SpeculationConfig
from baton.speculation.draft_model import DraftModelDrafter, Replay
from baton.speculation.drafter import Drafter
from baton.speculation.eagle import EagleDrafter, load_eagle
from baton.speculation.medusa import MedusaDrafter, load_medusa
from baton.speculation.ngram import NgramDrafter
from baton.text.errors import TokenizerError
from baton.text.tokenizer import Tokenizer
from baton_kernels.kv_layout import LayerKV


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is sped up, and how it runs."""

    model: CausalLM
    path: Path
    """The model's directory."""
    device: torch.device
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    load_format: LoadFormat
    replay: Replay | None
    """Records the passes of a draft model; None: they are not replayed."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter whose weights are on the device, and that needs to know how much KV it may keep."""

    block_bytes: int
    """The memory of the drafter for each KV block of the target, in bytes; 0: none."""
    build: Callable[[int], Drafter]
    """Builds the drafter, with room for the tokens of a number of blocks."""
    model: CausalLM | None = None
    """The draft model, whose passes ``Target.replay`` records; None: there is none."""


def plan_drafter(config: SpeculationConfig, target: Target) -> DraftPlan | None:
    """Loads what the method needs. None for ``none``; ValueError or ModelError if it cannot be loaded."""
    if config.method == "none":
        return None
    return _METHODS[config.method](config, target)


def _ngram(config: SpeculationConfig, target: Target) -> DraftPlan:
    return DraftPlan(0, lambda num_blocks: NgramDrafter(config.ngram_min, config.ngram_max))


def _draft(config: SpeculationConfig, target: Target) -> DraftPlan:
    path = _weights_of(config, target)
    _check_tokens(path, target.path)
    _check_kept(path, ModelConfig.from_dir(path))
    dtype = str(target.model.dtype).removeprefix("torch.")
    name = target.model.scheme.name
    quantization: Quantization = "auto" if name == "none" else name
    model = load_model(path, dtype, target.device, target.load_format, quantization=quantization)
    return DraftPlan(
        kv_block_bytes(model.config, target.block_size, model.dtype),
        lambda num_blocks: DraftModelDrafter(
            model,
            num_blocks,
            target.block_size,
            target.device,
            target.max_num_batched_tokens,
            target.replay,
        ),
        model,
    )


def _medusa(config: SpeculationConfig, target: Target) -> DraftPlan:
    heads = load_medusa(_weights_of(config, target), target.model, target.device)
    drafter = MedusaDrafter(heads, target.model, target.max_num_seqs)
    return DraftPlan(0, lambda num_blocks: drafter)


def _eagle(config: SpeculationConfig, target: Target) -> DraftPlan:
    layer, layer_config = load_eagle(_weights_of(config, target), target.model, target.device)
    # EAGLE's KV is of a fixed size and allocated at once, so that the rest for the pool is measured without
    # it.
    drafter = EagleDrafter(layer, layer_config, target.model, target.max_num_seqs)
    return DraftPlan(0, lambda num_blocks: drafter)


def _weights_of(config: SpeculationConfig, target: Target) -> Path:
    """The directory of the draft weights: the named one or, as the demo model has them, the directory of the
    method's name inside the model's own."""
    if config.model is not None:
        return hub.resolve_model(config.model)
    own = target.path / config.method
    if not own.is_dir():
        raise ValueError(
            f"speculative_method {config.method} needs a speculative_model: {target.path} has none of its own"
        )
    return own


def _check_kept(draft: Path, config: ModelConfig) -> None:
    """Checks that each layer keeps K and V of each token and nothing else, as the drafter's pool has room for
    no more. ModelError if not."""
    for layer, kept in enumerate(config.kept()):
        if [kv.kind for kv in kept] not in (["full"], ["window"]):
            raise ModelError(
                f"speculative_model {draft}: {config.architecture} keeps {_named(kept)} in layer {layer}; "
                "allowed: a model that keeps K and V of each token in all layers"
            )


def _named(kept: Sequence[LayerKV]) -> str:
    names = {"full": "K and V", "window": "K and V", "latent": "latents", "state": "a state"}
    return " and ".join(names[kv.kind] for kv in kept) or "nothing"


def _check_tokens(draft: Path, target: Path) -> None:
    """Checks that token ids mean the same in both models, as they go from one to the other. ModelError if
    not. (The size of the embedding may differ: models of one family pad it differently.)"""
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
    {"ngram": _ngram, "draft": _draft, "medusa": _medusa, "eagle": _eagle}
)
