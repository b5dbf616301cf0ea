"""What a request's output must look like. Shared by router and engine; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the whole output, by its source: its state is derived from the tokens."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    text: str = ""
    """JSON schema text; regex; JSON array of strings; llguidance Lark grammar."""
