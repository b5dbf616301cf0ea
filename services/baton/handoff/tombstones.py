"""The memory of attempts that are over, so that a late message cannot revive one."""

from __future__ import annotations

from collections import OrderedDict

from baton.handoff.messages import Name


class Tombstones:
    """The highest ended attempt of each request.

    Attempts of a request only grow, so one number covers every older one. An entry is forgotten ``keep_s``
    after its attempt ended, longer than any message can be under way. ``full`` says that new work must be
    refused: forgetting early would let a stale message act.
    """

    def __init__(self, keep_s: float = 600.0, limit: int = 1_000_000) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._ended: OrderedDict[str, tuple[int, float]] = OrderedDict()

    @property
    def full(self) -> bool:
        return len(self._ended) >= self._limit

    def bury(self, name: Name, now: float) -> None:
        attempt = max(name.attempt, self._ended.get(name.request_id, (-1, 0.0))[0])
        self._ended[name.request_id] = (attempt, now)
        self._ended.move_to_end(name.request_id)

    def covers(self, name: Name) -> bool:
        ended = self._ended.get(name.request_id)
        return ended is not None and name.attempt <= ended[0]

    def expire(self, now: float) -> None:
        while self._ended:
            request_id, (_, at) = next(iter(self._ended.items()))
            if now - at < self._keep_s:
                return
            del self._ended[request_id]
