"""Whether what drafts was made for the model that it drafts for."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ModelError
from baton.models.base import CausalLM


def check_fit(path: Path, target: CausalLM, **sizes: int) -> None:
    """ModelError unless each of ``sizes``, named as in config.json, is the model's."""
    for name, size in sizes.items():
        wanted = getattr(target.config, name)
        if size != wanted:
            raise ModelError(f"{path / 'config.json'}: {name} is {size}; allowed: {wanted}, the model's")
