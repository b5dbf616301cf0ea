"""A fixed set of workers, named when the router is started, as ``baton up`` does with its own processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.router.discovery.endpoint import Endpoint, Tell


class StaticDiscovery:
    """A fixed set of addresses. A process restarted at its address is detected by its stream."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = [Endpoint(address=address) for address in addresses]

    @property
    def known(self) -> Sequence[Endpoint]:
        return self._endpoints

    async def run(self, tell: Tell) -> None:
        tell(self._endpoints)
        await asyncio.Event().wait()

    @property
    def staleness_s(self) -> float:
        """Always 0: a fixed set is never stale."""
        return 0.0
