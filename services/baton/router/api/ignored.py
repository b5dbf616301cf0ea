"""The header of an answer that tells which fields of its request were not acted on."""

from __future__ import annotations

import re
from collections.abc import Sequence

HEADER = "x-baton-ignored-fields"
MAX_TOLD = 32
"""The most fields that an answer names."""

_TOLD = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def can_be_told(name: str) -> bool:
    """Whether a header can hold ``name``."""
    return _TOLD.fullmatch(name) is not None


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that tells the first of ``names``, each of which a header can hold; none if there are
    none."""
    told = list(dict.fromkeys(names))[:MAX_TOLD]
    return {HEADER: ", ".join(told)} if told else {}
