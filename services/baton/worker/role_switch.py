"""Switching a worker to another role while its process, weights, KV blocks and prefix cache stay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.core.role import Role
from baton.core.role_proto import role_to_proto
from baton.greeting.cluster_key import ClusterKeys
from baton.telemetry.switches import SwitchMetrics
from baton.v1 import worker_pb2
from baton.worker.drain import Drain
from baton.worker.switch_request import RoleIncarnation, SwitchRefusedError, role_asked_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    role: Role
    task: asyncio.Task[worker_pb2.SwitchRoleReply]


class RoleSwitch:
    """The switches of a worker's role, one at a time. Implements ``baton.worker.switch_request.Switching``.
    Event loop's thread only."""

    def __init__(
        self,
        current: RoleIncarnation,
        drain: Drain,
        take: Callable[[RoleIncarnation], None],
        metrics: SwitchMetrics,
        *,
        keys: ClusterKeys,
        timeout: float | None,
    ) -> None:
        """``take`` has the worker serve in another role at once; it is called while nothing is open.
        ``timeout``: the time to drain, in seconds, of a request that names none. None: no limit."""
        self._current = current
        self._drain = drain
        self._take = take
        self._metrics = metrics
        self._keys = keys
        self._timeout = timeout
        self._ending = False
        self._under_way: _UnderWay | None = None

    async def switch(self, request: worker_pb2.SwitchRoleRequest) -> worker_pb2.SwitchRoleReply:
        role = role_asked_for(request, self._current, self._keys)
        if self._ending:
            raise _ending()
        now = self._under_way
        if now is None and role == self._current.role:
            return _reply(role, role, 0.0)
        if now is None:
            run = self._run(role, request.timeout_s or self._timeout)
            now = self._under_way = _UnderWay(role, asyncio.create_task(run, name=f"switch to {role}"))
            now.task.add_done_callback(self._over)
        elif now.role != role:
            reason = f"a switch to {now.role} is under way; ask for {role} when it has ended"
            raise SwitchRefusedError(grpc.StatusCode.ABORTED, reason)
        return await asyncio.shield(now.task)  # the switch goes on if its caller leaves

    async def stop(self) -> None:
        """Begin no more switches, and cancel the one under way: the worker is told to end. The drain that
        follows waits for the work that the switch waited for."""
        self._ending = True
        if self._under_way is not None:
            task = self._under_way.task
            task.cancel()
            await asyncio.wait((task,))

    def _over(self, task: asyncio.Task[worker_pb2.SwitchRoleReply]) -> None:
        self._under_way = None
        if not task.cancelled() and isinstance(error := task.exception(), SwitchRefusedError):
            log.warning("no switch of role: %s", error)  # the caller may have left

    async def _run(self, role: Role, timeout: float | None) -> worker_pb2.SwitchRoleReply:
        was, began = self._current.role, time.monotonic()
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
        self._current = RoleIncarnation.new(role)
        self._take(self._current)  # still in the turn of the event loop in which nothing was open
        self._metrics.ended(was, role, "switched", seconds)
        log.info("switched from %s to %s in %.2f s", was, role, seconds)
        await self._drain.end_pause()
        return _reply(was, role, seconds)


def _reply(was: Role, now: Role, seconds: float) -> worker_pb2.SwitchRoleReply:
    return worker_pb2.SwitchRoleReply(was=role_to_proto(was), now=role_to_proto(now), seconds=seconds)


def _ending() -> SwitchRefusedError:
    return SwitchRefusedError(grpc.StatusCode.FAILED_PRECONDITION, "this worker is ending")
