"""A worker takes another role while its process, weights, KV blocks and prefix cache stay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.telemetry.switches import SwitchMetrics
from baton.v1 import worker_pb2
from baton.worker.config import RoleName
from baton.worker.drain import Drain
from baton.worker.post import Post
from baton.worker.switch_request import TO_PROTO, SwitchRefusedError, role_asked_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    role: RoleName
    task: asyncio.Task[worker_pb2.SwitchRoleReply]


class RoleSwitch:
    """One switch at a time; ``baton.worker.switch_request.Switching``. Event loop's thread only."""

    def __init__(
        self,
        post: Post,
        drain: Drain,
        take: Callable[[Post], None],
        metrics: SwitchMetrics,
        *,
        cluster_key: bytes,
        timeout: float | None,
    ) -> None:
        """``take`` has the worker serve in another post from that moment on; it is called while nothing is
        open. ``timeout``: seconds, where a request names none; None: as long as what is open takes."""
        self._post = post
        self._drain = drain
        self._take = take
        self._metrics = metrics
        self._cluster_key = cluster_key
        self._timeout = timeout
        self._ending = False
        self._under_way: _UnderWay | None = None

    async def switch(self, request: worker_pb2.SwitchRoleRequest) -> worker_pb2.SwitchRoleReply:
        role = role_asked_for(request, self._post, self._cluster_key)
        if self._ending:
            raise _ending()
        now = self._under_way
        if now is None and role == self._post.role:
            return _reply(role, role, 0.0)
        if now is None:
            run = self._run(role, request.timeout_s or self._timeout)
            now = self._under_way = _UnderWay(role, asyncio.create_task(run, name=f"switch to {role}"))
            now.task.add_done_callback(self._over)
        elif now.role != role:
            reason = f"a switch to {now.role} is under way; ask for {role} when it has ended"
            raise SwitchRefusedError(grpc.StatusCode.ABORTED, reason)
        return await asyncio.shield(now.task)  # whoever asked may go away: it is begun

    async def stop(self) -> None:
        """The worker is told to end: none begins any more, and one under way is left where it is. What it
        waited for, the drain that follows waits for."""
        self._ending = True
        if self._under_way is not None:
            task = self._under_way.task
            task.cancel()
            await asyncio.wait((task,))

    def _over(self, task: asyncio.Task[worker_pb2.SwitchRoleReply]) -> None:
        self._under_way = None
        if not task.cancelled() and isinstance(error := task.exception(), SwitchRefusedError):
            log.warning("no switch of role: %s", error)  # who asked may not hear of it any more

    async def _run(self, role: RoleName, timeout: float | None) -> worker_pb2.SwitchRoleReply:
        was, began = self._post.role, time.monotonic()
        log.info("switching from %s to %s", was, role)
        try:
            quiet = await self._drain.pause(timeout)
        except asyncio.CancelledError:
            self._metrics.ended(was, role, "interrupted", time.monotonic() - began)
            raise _ending() from None
        seconds = time.monotonic() - began
        if not quiet:
            self._metrics.ended(was, role, "timeout", seconds)
            left = await self._drain.give_up_pause()
            reason = f"still open after {seconds:.1f} s, and it serves on as {was}: {left}"
            raise SwitchRefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        self._post = Post.new(role)
        self._take(self._post)  # in the turn of the event loop in which nothing was found open
        self._metrics.ended(was, role, "switched", seconds)
        log.info("switched from %s to %s in %.2f s", was, role, seconds)
        await self._drain.end_pause()
        return _reply(was, role, seconds)


def _reply(was: RoleName, now: RoleName, seconds: float) -> worker_pb2.SwitchRoleReply:
    return worker_pb2.SwitchRoleReply(was=TO_PROTO[was], now=TO_PROTO[now], seconds=seconds)


def _ending() -> SwitchRefusedError:
    return SwitchRefusedError(grpc.StatusCode.FAILED_PRECONDITION, "this worker is ending")
