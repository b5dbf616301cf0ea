"""What happened to the workers lately: they come, go, drain, take another role, are ejected."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from baton.telemetry.ring import WorkerView

MAX_CHANGES = 60
"""Most changes that are kept."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one worker. ``at`` is in seconds of ``time.monotonic``."""

    at: float
    worker: str
    what: str
    """The change in a few words: ``ready``, ``lost``, ``draining``, ``prefill to decode``, …"""


class Changes:
    """Finds the changes between two looks at the workers. Event loop's thread only."""

    def __init__(self) -> None:
        self.latest: deque[Change] = deque(maxlen=MAX_CHANGES)
        """The changes, the latest last."""
        self._seen: dict[str, WorkerView] = {}
        self._roles: dict[str, str] = {}
        """The role that each worker had when it was last ready."""
        self._looked = False

    def role_of(self, view: WorkerView) -> str:
        """Return the worker's role; of one that is not ready, the role that it had last, or ``unknown``."""
        return self._roles.get(view.address, view.role)

    def look(self, views: Iterable[WorkerView], now: float) -> None:
        """Note what has changed since the last look. The first look notes nothing."""
        seen = {view.address: view for view in views}
        for address, view in seen.items():
            for what in self._told(self._seen.get(address), view):
                self._note(now, address, what)
            if view.ready:
                self._roles[address] = view.role
        for address in self._seen.keys() - seen.keys():
            self._note(now, address, "gone")
            self._roles.pop(address, None)
        self._seen = seen
        self._looked = True

    def _note(self, now: float, worker: str, what: str) -> None:
        if self._looked:
            self.latest.append(Change(now, worker, what))

    def _told(self, before: WorkerView | None, view: WorkerView) -> Iterable[str]:
        if before is None:
            yield f"known, {view.role}" if view.ready else "known"
            return
        role = self._roles.get(view.address)
        if view.ready and role not in (None, view.role):
            yield f"{role} to {view.role}"
        elif view.ready and not before.ready:
            yield f"ready, {view.role}"
        if before.ready and not view.ready:
            yield "left, drained" if view.drained else "lost"
        if view.draining and not before.draining:
            yield "draining"
        if view.ejected != before.ejected:
            yield "ejected" if view.ejected else "back from ejection"
        if view.refused and not before.refused:
            yield "refused"
