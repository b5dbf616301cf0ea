"""What becomes of answers whose worker leaves: it is lost, or it drains."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from baton.router.answers import Group
from baton.router.attempts import Attempts
from baton.router.fleet import Fleet
from baton.router.types import RingError
from baton.router.workers import WorkerClient

log = logging.getLogger(__name__)

FLED_S = 3.0
"""A handoff may be heard to break before the stream of the worker whose death broke it."""
MOVES_AT_ONCE = 8
"""Answers that are on their way from one decode worker that drains; its others are written on meanwhile."""
WORTH_MOVING = 16
"""Tokens that an answer has left at least, for its move to take less time than its rest."""


class Departures:
    """``groups`` are all that are under way."""

    def __init__(self, fleet: Fleet, attempts: Attempts) -> None:
        self._fleet = fleet
        self._attempts = attempts

    def lost(self, worker: WorkerClient, groups: Sequence[Group]) -> None:
        """Its stream has ended: what was on it goes on elsewhere."""
        if worker.drained:  # what it had to hand on is with decode
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
            message = f"the {role} worker answering this request was lost, in attempt {part.attempt}"
            error = RingError(503, "worker_lost", message)
            if worker.draining:  # its time was over, and it had said so: no failure of the request
                log.warning("request %s: attempt %d ended: %s", part.name, part.attempt - 1, error)
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
        """Have the answers of a decode worker that drains written on by others, a few at a time. What is
        still being handed on to it comes later; with nobody else of its revision to decode, or while requests
        wait for those there are, they stay where they are."""
        assert worker.hello is not None
        revision = worker.hello.revision
        decoders = [
            other
            for other in self._fleet.workers
            if other is not worker and other.usable and other.role != "prefill"
            if other.hello is not None and other.hello.revision == revision
        ]
        if worker.role == "prefill" or not decoders or len(self._attempts.waiting):
            return
        moving = sum(group.left is worker for group in groups)
        for group in groups:
            if moving >= MOVES_AT_ONCE:
                return
            if group.decode is worker and self._is_movable(group):
                if self._attempts.choose(group) is None:
                    return  # answers need prefill workers, and there are none
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
