"""What the headers of an answer tell of how it went."""

from __future__ import annotations

from baton.router.api.admission import Ticket
from baton.router.traces.document import server_timing


def told_headers(ticket: Ticket) -> dict[str, str]:
    """Of an answer that is given whole: what is left of its tenant's limits, and where its time went."""
    timing = {} if ticket.trace is None else {"server-timing": server_timing(ticket.trace)}
    return {**ticket.headers, **timing}
