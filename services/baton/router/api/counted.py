"""Requests that generate nothing: they count for their tenant's limits all the same, but for its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from baton.router.api.admission import limit_headers, refusal
from baton.router.api.catalogue import Catalogue
from baton.router.security.client import Client


@asynccontextmanager
async def counted(catalogue: Catalogue, client: Client | None) -> AsyncIterator[Mapping[str, str]]:
    """Counts one request of ``client`` for as long as the context is open. Gives the headers that tell what
    is left of its limits. Raises ApiError (429) when one is reached."""
    tenant = catalogue.authentication.answerable(client).tenant
    shared = catalogue.services[0].shared
    decision, lease = await shared.admit(tenant, 0)
    try:
        if decision.refused_by is not None:
            raise refusal(tenant, decision, 0)
        yield limit_headers(decision)
    finally:
        if lease is not None:
            shared.settle(lease, 0)
