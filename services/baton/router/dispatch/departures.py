"""The fate of answers whose worker leaves, because it is lost or drains."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from baton.core.role import may_decode
from baton.router.dispatch.answers import Group
from baton.router.dispatch.attempts import Attempts
from baton.router.dispatch.types import RingError
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.worker_client import WorkerClient

log = logging.getLogger(__name__)

FLED_S = 3.0
"""The longest time between the news of a broken handoff and the end of the stream of the worker whose death
broke it, in seconds."""
MOVES_AT_ONCE = 8
"""Most answers on their way from one draining decode worker at once; it goes on decoding its others."""
WORTH_MOVING = 16
"""Fewest tokens left to decode for which a move takes less time than decoding them."""


class Departures:
    """Moves answers off workers that leave. Methods get all groups under way as ``groups``."""

    def __init__(self, fleet: Fleet, attempts: Attempts) -> None:
        self._fleet = fleet
        self._attempts = attempts

    def lost(self, worker: WorkerClient, groups: Sequence[Group]) -> None:
        """Place the answers of a worker whose stream has ended on other workers."""
        if worker.drained:  # all that it had to hand on is at decode
            for group in groups:
                if worker is group.prefill:
                    group.prefill = None
        broken = [group for group in groups if worker in group.workers and group.going]
        if broken or not worker.drained:
            count = sum(len(group.going) for group in broken)
            log.warning("worker %s is lost, and %d attempts with it", worker.address, count)
        roles = {id(group): "decode" if worker is group.decode else "prefill" for group in broken}
        computed = {answer for group in broken if worker in group.computing for answer in group.going}
        lost = [
            (part, roles[id(group)])
            for group in broken
            for part in self._attempts.withdraw(group, but=worker)
        ]
        fled = [group for group in groups if group not in broken and self._fled_from(group, worker)]
        if not worker.draining:
            self._attempts.blame([*(part for part, _ in lost if computed.intersection(part.answers)), *fled])
        for part, role in sorted(lost, key=lambda each: each[0].turn):
            if not part.going:
                continue
            ended = part.attempt - 1  # the next attempt has its number already; all count from 0
            message = f"the {role} worker answering this request was lost, in attempt {ended}"
            error = RingError(503, "worker_lost", message)
            if worker.draining:  # the worker had announced its end: no failure of the request
                log.warning("request %s: attempt %d ended: %s", part.name, ended, error)
                self._attempts.go_on(part, "drain", error)
            else:
                self._attempts.resume(part, "worker_lost", error)

    @staticmethod
    def _fled_from(group: Group, worker: WorkerClient) -> bool:
        if group.fled is None or not group.going:
            return False
        other, since = group.fled
        return other is worker and time.monotonic() - since < FLED_S

    def move_from(self, worker: WorkerClient, groups: Sequence[Group]) -> None:
        """Move the answers of a draining decode worker to others, a few at a time. An answer that is still
        being handed on to it moves later. All stay where they are if no other worker of its revision can
        decode, or while requests wait for a worker."""
        assert worker.hello is not None
        revision = worker.hello.revision
        decoders = [
            other
            for other in self._fleet.workers
            if other is not worker and other.usable and may_decode(other.role)
            if other.hello is not None and other.hello.revision == revision
        ]
        if not may_decode(worker.role) or not decoders or len(self._attempts.waiting):
            return
        moving = sum(group.left is worker for group in groups)
        for group in groups:
            if moving >= MOVES_AT_ONCE:
                return
            if group.decode is worker and self._is_movable(group):
                if self._attempts.placing.choose(group) is None:
                    return  # moved answers need a prefill worker, and none is ready
                for part in self._attempts.withdraw(group):
                    part.left = worker
                    log.info("request %s: attempt %d ended: its worker drains", part.name, part.attempt - 1)
                    self._attempts.go_on(part, "drain", RingError(503, "worker_lost", "its worker drains"))
                    moving += 1

    @staticmethod
    def _is_movable(group: Group) -> bool:
        if group.is_search or not (group.parted or group.prefill is None):
            return False
        left = (a.request.params.max_tokens - len(a.entry.output_ids) for a in group.going)
        return max(left, default=0) >= WORTH_MOVING
