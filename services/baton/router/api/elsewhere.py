"""Where bodies are read that would hold up the event loop, as the APIs see it."""

from __future__ import annotations

from typing import Protocol

from baton.router.api.prepared import Assignment, Document, PreparedJob
from baton.router.shared.limits import Tenant


class ElsewhereReader(Protocol):
    """Reads bodies where they hold up nobody."""

    async def prepare(self, tenant: Tenant, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        """What ``body`` asks for, read in ``tenant``'s share of what there is. Raises ApiError."""
