"""From a command's parameters to the fields of a configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def given(ctx: typer.Context, config: type[DataclassInstance], *but: str) -> dict[str, Any]:
    """The parameters of the command that are fields of ``config``; they are named alike."""
    names = {field.name for field in fields(config)} - set(but)
    return {name: value for name, value in ctx.params.items() if name in names}
