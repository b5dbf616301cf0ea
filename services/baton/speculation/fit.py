"""The check that draft weights were made for the model that they draft for."""

from __future__ import annotations

from pathlib import Path

from baton.models.base import CausalLM
from baton.process.options import ModelError


def check_fit(path: Path, target: CausalLM, **sizes: int) -> None:
    """Checks that each of ``sizes``, named as in config.json, is the model's. ModelError if not."""
    for name, size in sizes.items():
        wanted = getattr(target.config, name)
        if size != wanted:
            raise ModelError(f"{path / 'config.json'}: {name} is {size}; allowed: {wanted}, the model's")
