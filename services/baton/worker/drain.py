"""Draining a worker that is to stop or to change its role: it takes no new requests and finishes its own."""

from __future__ import annotations

import asyncio
import logging

from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse

from baton.roles.prefill_links import DecodeLinks
from baton.worker.engine_loop import EngineLoop
from baton.worker.routers import Routers
from baton.worker.service import OpenWork, WorkerService

log = logging.getLogger(__name__)

READY_SERVICES = ("", "baton.v1.Worker", "baton.v1.Handoff")
"""The names in the health service of a worker that takes requests."""
LIVE_SERVICE = "liveness"
"""The name in the health service of a worker that runs, even while it drains: it must not be killed then."""
LOOK_S = 0.02
CUT_S = 5.0
"""The time in which work that was cut off must have ended, in seconds. A link that cannot be fenced ends the
process before."""


class Drain:
    """The drain of a worker, which interrupts no request. Routers are told, and place no new request here;
    each acknowledges after its last submit. Prefill workers, to which routers no longer name this worker,
    close each link when the last handoff over it has ended. Open requests end as they would have ended
    anyway.
    """

    def __init__(
        self,
        service: WorkerService,
        routers: Routers,
        links: DecodeLinks,
        engine_loop: EngineLoop,
        health: HealthServicer,
    ) -> None:
        self._service = service
        self._routers = routers
        self._links = links
        self._engine_loop = engine_loop
        self._health = health

    async def run(self, timeout: float | None) -> bool:
        """Drain, and tell the routers when the worker has drained. Returns False if that took longer than
        ``timeout`` seconds."""
        await self._tell_health(HealthCheckResponse.NOT_SERVING)
        self._service.drain()
        log.info("draining: %s", self._service.open_work())
        try:
            async with asyncio.timeout(timeout):
                await self._until_nothing_is_open()
        except TimeoutError:
            log.warning("the drain took longer than %s s; still open: %s", timeout, self._service.open_work())
            return False
        self._routers.say_drained()
        log.info("drained")
        return True

    async def pause(self, timeout: float | None) -> bool:
        """Drain, for the process to go on in another role. Work still open after ``timeout`` seconds is cut
        off, and routers resume it elsewhere.

        Returns True if nothing is open, and no link to or from here is left, in this turn of the event loop;
        False if work is open even after the cut-off.
        """
        await self._tell_health(HealthCheckResponse.NOT_SERVING)
        self._service.drain()
        log.info("draining: %s", self._service.open_work())
        if await self._idle_within(timeout):
            return True
        log.warning("cut off after %s s, to go on elsewhere: %s", timeout, self._service.open_work())
        self._service.cut_off()
        return await self._idle_within(CUT_S)

    async def end_pause(self) -> None:
        """Report the worker as serving again."""
        await self._tell_health(HealthCheckResponse.SERVING)

    async def give_up_pause(self) -> OpenWork:
        """Serve on in the same role. Routers call again, as their streams were cut off. Returns what is still
        open."""
        left = self._service.open_work()
        self._service.resume()
        await self.end_pause()
        return left

    async def _tell_health(self, status: HealthCheckResponse.ServingStatus) -> None:
        for service in READY_SERVICES:
            await self._health.set(service, status)

    async def _idle_within(self, timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._until_nothing_is_open()
                while self._links:
                    await self._links.close()
                    await self._until_nothing_is_open()  # routers may have come meanwhile
        except TimeoutError:
            return False
        return True

    async def _until_nothing_is_open(self) -> None:
        while True:
            if not self._service.open_work():
                # The tokens of the last step may not have reached the routers' streams yet.
                await self._engine_loop.settled()
                if not self._service.open_work():
                    return
            await asyncio.sleep(LOOK_S)
