"""The kinds of linear attention's parts. Imports no torch."""

from __future__ import annotations

from typing import Literal

GateKind = Literal["silu", "sigmoid"]
"""The activation of the gates of outputs."""
