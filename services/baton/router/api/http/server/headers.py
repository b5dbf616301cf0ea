"""The headers of an answer that describe how it was made."""

from __future__ import annotations

from baton.router.api.scope import RequestScope
from baton.router.traces.document import server_timing


def answer_headers(scope: RequestScope) -> dict[str, str]:
    """Return the headers of an answer that is sent as a whole: what is left of its tenant's limits, and where
    its time went."""
    return {**scope.headers, "server-timing": server_timing(scope.trace)}
