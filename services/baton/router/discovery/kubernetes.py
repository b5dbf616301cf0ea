"""Discovery of workers from the EndpointSlices of a Kubernetes namespace.

The loop is a list, a watch from its version, and a list again, whatever ended the watch. A watch may miss
changes: events get lost behind proxies and restarted API servers, and a connection that died silently looks
like a quiet one. So no watch lasts longer than a deleted pod may be given requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from baton.router.discovery.api_server import ApiServer, ApiServerError
from baton.router.discovery.endpoint import Endpoint, Tell
from baton.router.discovery.inventory import Inventory
from baton.router.discovery.pace import WatchTimings
from baton.router.discovery.slices import ApiStatus, EndpointSlice, EndpointSliceList, WatchEvent
from baton.telemetry.discovery import DiscoveryCounts

log = logging.getLogger(__name__)

GONE = 410
PATIENT_TRIES = 2
"""Lists that may time out before the next gets more time: an API server that is slow but not stalled must
answer in the end."""
MAX_PATIENCE = 16.0


class KubernetesDiscovery:
    """Keeps the set of workers while ``run`` runs."""

    def __init__(
        self, api: ApiServer, port_name: str, counts: DiscoveryCounts, pace: WatchTimings | None = None
    ) -> None:
        self._api = api
        self._pace = pace or WatchTimings()
        self._counts = counts
        self._inventory = Inventory(port_name)
        self._told: list[Endpoint] | None = None
        self._confirmed_at = -math.inf
        self._bad_lists = 0
        self._bad_watches = 0
        """Failed watches in a row. Failed lists are counted apart, so that a failed list is repeated soon
        even after many failed watches: changes missed meanwhile must not stay missed."""
        self._timeouts = 0
        """Lists in a row that timed out."""

    @property
    def known(self) -> Sequence[Endpoint]:
        return self._told or ()

    @property
    def staleness_s(self) -> float:
        """The time since the API server last sent anything about its slices, in seconds."""
        return time.monotonic() - self._confirmed_at

    async def run(self, tell: Tell) -> None:
        try:
            while True:
                await self._list_and_watch(tell)
        finally:
            await self._api.close()

    async def _list_and_watch(self, tell: Tell) -> None:
        """List and watch once. The next list corrects whatever fails."""
        try:
            version = await self._list(tell)
        except Exception as error:  # noqa: BLE001
            self._bad_lists += 1
            await self._pause_after(error, self._bad_lists)
            return
        try:
            await self._watch(version, tell)
        except Exception as error:  # noqa: BLE001
            self._bad_watches += 1
            await self._pause_after(error, self._bad_watches)

    async def _list(self, tell: Tell) -> str:
        """Replace the known slices by a list. Returns the version of the list."""
        patience = min(MAX_PATIENCE, 2.0 ** max(0, self._timeouts - PATIENT_TRIES + 1))
        try:
            body = await self._api.list(self._pace.list_s * patience)
            listed = msgspec.json.decode(body, type=EndpointSliceList)
        except Exception as error:
            self._timeouts += isinstance(error, TimeoutError)
            self._counts.lists.labels(_word(error)).inc()
            raise
        self._timeouts = self._bad_lists = 0
        self._inventory.replace(listed.items or ())
        self._confirm(tell)
        self._counts.lists.labels("ok").inc()
        return listed.metadata.resource_version

    async def _watch(self, version: str, tell: Tell) -> None:
        """Apply changes until the watch ends in order or by its timeout. Raises the error that ends it
        otherwise."""
        pace = self._pace
        began = time.monotonic()
        reason = "end"
        try:
            async with asyncio.timeout(pace.watch_s + pace.grace_s):
                async with self._api.watch(version, pace.watch_s, pace.list_s) as lines:
                    await self._follow(lines, tell)
            if time.monotonic() - began < pace.watch_s / 4:
                raise ApiServerError(200, "the watch ended before its time")
            self._bad_watches = 0
        except TimeoutError:
            reason = "silent"
        except Exception as error:
            reason = _word(error)
            raise
        finally:
            self._counts.watches.labels(reason).inc()

    async def _follow(self, lines: AsyncIterator[bytes], tell: Tell) -> None:
        async for line in lines:
            event = msgspec.json.decode(line, type=WatchEvent)
            kind = event.type
            if kind == "ERROR":
                status = msgspec.json.decode(event.object, type=ApiStatus)
                raise ApiServerError(status.code, status.message or status.reason)
            if kind in ("ADDED", "MODIFIED", "DELETED"):
                self._inventory.apply(kind, msgspec.json.decode(event.object, type=EndpointSlice))
            elif kind != "BOOKMARK":
                kind = "other"
            self._counts.events.labels(kind).inc()
            self._confirm(tell)

    def _confirm(self, tell: Tell) -> None:
        """Note that the set is confirmed now, and tell it if it has changed."""
        self._confirmed_at = time.monotonic()
        endpoints = self._inventory.endpoints()
        if endpoints != self._told:
            self._told = endpoints
            tell(endpoints)

    async def _pause_after(self, error: Exception, failures: int) -> None:
        """Pause, longer after each failure, for a random time, so that routers do not retry together. The
        first 410, which only means that the version is too old, causes no pause."""
        known = isinstance(error, ApiServerError) and error.status == GONE
        level = logging.DEBUG if known or failures == 1 else logging.WARNING
        log.log(level, "discovery: failure %d in a row: %s", failures, error or type(error).__name__)
        if known and failures == 1:
            return
        pace = self._pace
        longest = min(pace.max_pause_s, pace.first_pause_s * 2.0 ** min(failures - 1, 10))
        await asyncio.sleep(longest * random.uniform(0.5, 1))


def _word(error: Exception) -> str:
    """Return the metric label of a failure, one of a few."""
    if isinstance(error, ApiServerError):
        if error.status == 200:
            return "early" if "ended" in str(error) else "malformed"
        return "gone" if error.status == GONE else f"http_{error.status // 100}xx"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "malformed" if isinstance(error, msgspec.MsgspecError) else "connection"
