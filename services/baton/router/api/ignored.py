"""The header of an answer that tells which fields of its request were not acted on."""

from __future__ import annotations

import re
from collections.abc import Sequence

HEADER = "x-baton-ignored-fields"
MAX_TOLD = 32
"""The most fields that an answer names."""

_TOLD = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that tells ``names``; none if there are none. A name that a header cannot hold is
    left out."""
    told = [name for name in dict.fromkeys(names) if _TOLD.fullmatch(name)][:MAX_TOLD]
    return {HEADER: ", ".join(told)} if told else {}
