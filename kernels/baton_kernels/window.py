"""The tokens that a query sees. Imports no torch: configs name windows, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ChunkedWindow:
    """The window of a query that sees, up to itself, the tokens of its own run: position p is in run ``p //
    size`` (Llama 4)."""

    size: int


Window: TypeAlias = int | ChunkedWindow
"""The tokens that a query sees. A number: the last so many, its own included."""
