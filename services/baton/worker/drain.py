"""A worker that is to stop, or to become another: it takes nothing new, and what it has ends in its time."""

from __future__ import annotations

import asyncio
import logging

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from baton.worker.engine_loop import EngineLoop
from baton.worker.service import OpenWork, WorkerService

log = logging.getLogger(__name__)

LOOK_S = 0.02
CUT_S = 5.0
"""For what was cut off to be over: a link that cannot be fenced ends the process before that."""

SERVICES = ("baton.v1.Worker", "baton.v1.Handoff")
"""Whose health says whether the worker takes requests. That of "" says that the process lives."""


class Drain:
    """Nobody is cut off in the middle. Routers are told, and place nothing new here; each says that it has
    heard, after its last submit. Prefill workers, whose routers name this worker no more, close their links
    when their last handoff over them has ended. What was open by then ends as it would have ended anyway.
    """

    def __init__(self, service: WorkerService, engine_loop: EngineLoop, health: HealthServicer) -> None:
        self._service = service
        self._engine_loop = engine_loop
        self._health = health

    async def run(self, timeout: float | None) -> bool:
        """Drain, and tell the routers when it is done. False: ``timeout`` seconds were not enough."""
        await self._health.enter_graceful_shutdown()
        self._service.drain()
        log.info("draining: %s", self._service.open_work())
        try:
            async with asyncio.timeout(timeout):
                await self._until_nothing_is_open()
        except TimeoutError:
            log.warning("the drain took longer than %s s; still open: %s", timeout, self._service.open_work())
            return False
        self._service.say_drained()
        log.info("drained")
        return True

    async def pause(self, timeout: float | None) -> bool:
        """Drain, for the process to go on as another. True: nothing is open, and there is no link to or from
        here, in this turn of the event loop. What ``timeout`` seconds were not enough for is cut off, for the
        routers to have it go on elsewhere; False: not even that has ended it."""
        await self._tell_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._service.drain()
        log.info("draining: %s", self._service.open_work())
        if await self._idle_within(timeout):
            return True
        log.warning("cut off after %s s, to go on elsewhere: %s", timeout, self._service.open_work())
        self._service.cut_off()
        return await self._idle_within(CUT_S)

    async def end_pause(self) -> None:
        """It serves again."""
        await self._tell_health(health_pb2.HealthCheckResponse.SERVING)

    async def give_up_pause(self) -> OpenWork:
        """Nothing has changed but for what was cut off: routers call again. Returns what is still open."""
        left = self._service.open_work()
        self._service.resume()
        await self.end_pause()
        return left

    async def _tell_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in SERVICES:
            await self._health.set(service, status)

    async def _idle_within(self, timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._until_nothing_is_open()
                while self._service.linked:
                    await self._service.unlink()
                    await self._until_nothing_is_open()  # routers may have come meanwhile
        except TimeoutError:
            return False
        return True

    async def _until_nothing_is_open(self) -> None:
        while True:
            if not self._service.open_work():
                # The last step may be over and its tokens still on their way to the routers' streams.
                await self._engine_loop.settled()
                if not self._service.open_work():
                    return
            await asyncio.sleep(LOOK_S)
