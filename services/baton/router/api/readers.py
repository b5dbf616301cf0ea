"""The readers of bodies, as the APIs see them: the event loop itself, or another process."""

from __future__ import annotations

from typing import Protocol

from baton.router.api.prepared import Assignment, Document, PreparedJob
from baton.router.shared.limits import Tenant
from baton.tools.answer import AnswerFormat


class HereReader(Protocol):
    """Reads bodies on the event loop."""

    def prepare(self, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        """Return what ``body`` asks for. Raises RequestError, ApiError, and NotHereError."""

    def format_of(self, prepared: PreparedJob) -> AnswerFormat | None:
        """Return how the answers to a chat are parsed; None: as content alone."""


class ElsewhereReader(Protocol):
    """Reads bodies off the event loop."""

    async def prepare(self, tenant: Tenant, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        """Return what ``body`` asks for, read in ``tenant``'s share of the processes. Raises ApiError."""
