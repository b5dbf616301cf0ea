"""What shells complete: values of options, and names of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Completion = Callable[[str], list[str]]
"""The values that begin with what is typed so far."""


def among(values: Sequence[str]) -> Completion:
    """Complete to one of ``values``."""

    def complete(incomplete: str) -> list[str]:  # typer finds its parameters by their names
        return [value for value in values if value.startswith(incomplete)]

    return complete


def model_names(incomplete: str) -> list[str]:
    """The demo model, and the checkpoints that `baton models` lists as examples."""
    from baton.hub import DEMO
    from baton.models.registry import FAMILIES

    checkpoints = {name for family in FAMILIES.values() for name in family.checkpoints}
    return among([DEMO, *sorted(checkpoints)])(incomplete)
