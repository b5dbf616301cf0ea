"""Workers from the EndpointSlices of a Kubernetes namespace.

The loop is a list, a watch from it, and again, whatever ended the watch. A watch cannot be trusted to tell
everything: events get lost behind proxies and restarted API servers, and a connection that died silently
looks like one where nothing happens. So no watch lasts for longer than a deleted pod may be given requests.
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
from baton.router.discovery.pace import Pace
from baton.router.discovery.slices import EndpointSlice, EndpointSliceList, Status, WatchEvent
from baton.telemetry.discovery import DiscoveryCounts

log = logging.getLogger(__name__)

GONE = 410
PATIENT_TRIES = 2
"""Lists that may time out before the next gets more time: an API server that is slow, and not stalled, must
be waited for in the end."""
MOST_PATIENCE = 16.0


class KubernetesDiscovery:
    """Keeps the set of workers for as long as ``run`` runs."""

    def __init__(
        self, api: ApiServer, port_name: str, counts: DiscoveryCounts, pace: Pace | None = None
    ) -> None:
        self._api = api
        self._pace = pace or Pace()
        self._counts = counts
        self._inventory = Inventory(port_name)
        self._told: list[Endpoint] | None = None
        self._confirmed_at = -math.inf
        self._bad_lists = 0
        self._bad_watches = 0
        """In a row, and each by itself: a list that fails is repeated soon, whatever befell the watches
        before it, or what was missed meanwhile would be missed for too long."""
        self._timeouts = 0
        """Lists in a row that took too long."""

    @property
    def known(self) -> Sequence[Endpoint]:
        return self._told or ()

    @property
    def staleness_s(self) -> float:
        """Seconds since the API server last said anything of its slices."""
        return time.monotonic() - self._confirmed_at

    async def run(self, tell: Tell) -> None:
        try:
            while True:
                await self._list_and_watch(tell)
        finally:
            await self._api.close()

    async def _list_and_watch(self, tell: Tell) -> None:
        """Once. Whatever fails, the next list puts it right."""
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
        """Replace what is known. Returns the version of it."""
        patience = min(MOST_PATIENCE, 2.0 ** max(0, self._timeouts - PATIENT_TRIES + 1))
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
        """Apply changes until the watch ends, well or by its time. Raises what ends it badly."""
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
                status = msgspec.json.decode(event.object, type=Status)
                raise ApiServerError(status.code, status.message or status.reason)
            if kind in ("ADDED", "MODIFIED", "DELETED"):
                self._inventory.apply(kind, msgspec.json.decode(event.object, type=EndpointSlice))
            elif kind != "BOOKMARK":
                kind = "other"
            self._counts.events.labels(kind).inc()
            self._confirm(tell)

    def _confirm(self, tell: Tell) -> None:
        """The set is known as of now; tell it if it differs."""
        self._confirmed_at = time.monotonic()
        endpoints = self._inventory.endpoints()
        if endpoints != self._told:
            self._told = endpoints
            tell(endpoints)

    async def _pause_after(self, error: Exception, failures: int) -> None:
        """Longer after each failure, and never the same as other routers'. None after the first 410, which
        only says that the version is too old."""
        known = isinstance(error, ApiServerError) and error.status == GONE
        level = logging.DEBUG if known or failures == 1 else logging.WARNING
        log.log(level, "discovery: failure %d in a row: %s", failures, error or type(error).__name__)
        if known and failures == 1:
            return
        pace = self._pace
        longest = min(pace.longest_pause_s, pace.first_pause_s * 2.0 ** min(failures - 1, 10))
        await asyncio.sleep(longest * random.uniform(0.5, 1))


def _word(error: Exception) -> str:
    """The label of a failure: bounded, and of use to whoever reads it."""
    if isinstance(error, ApiServerError):
        if error.status == 200:
            return "early" if "ended" in str(error) else "malformed"
        return "gone" if error.status == GONE else f"http_{error.status // 100}xx"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "malformed" if isinstance(error, msgspec.MsgspecError) else "connection"
