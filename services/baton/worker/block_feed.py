"""The feed of a worker's prefix cache to one router: a snapshot, then every change, a bounded part in each
frame."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.block_hash import DIGEST_BYTES, short
from baton.engine.engine import Engine
from baton.v1 import worker_pb2

MAX_HASHES = 4096
"""Most hashes of one message: 32 KiB."""


class BlockFeed:
    """How much of the prefix cache one router has been told. Event loop's thread only."""

    def __init__(self, engine: Engine, most: int = MAX_HASHES) -> None:
        """``most``: most hashes in a message."""
        self._engine = engine
        self._most = most
        self._snapshot: list[bytes] = []
        """The keys that are left of the snapshot, not sent yet, in reverse order."""
        self._restart = True
        self._next = 0

    def restart(self) -> None:
        """Send a new snapshot next: the router has missed a change."""
        self._restart = True

    @property
    def behind(self) -> bool:
        """Whether there is more to send now than fitted in the last message."""
        return self._restart or bool(self._snapshot) or self._engine.prefix_end - self._next >= self._most

    def take(self) -> worker_pb2.BlockEvents | None:
        """Return the next message, or None if there is nothing to send."""
        if self._restart:
            return self._begin()
        if self._snapshot:
            return self._tell_part(restart=False)
        changes = self._engine.prefix_changes(self._next, self._most)
        if changes is None:  # too far behind
            return self._begin()
        if changes.first == changes.end:
            return None
        self._next = changes.end
        events = worker_pb2.BlockEvents(first=changes.first, end=changes.end)
        _add(events, changes.stored, changes.removed)
        return events

    def _begin(self) -> worker_pb2.BlockEvents:
        self._restart = False
        keys, self._next = self._engine.prefix_snapshot()
        self._snapshot = keys[::-1]
        return self._tell_part(restart=True)

    def _tell_part(self, *, restart: bool) -> worker_pb2.BlockEvents:
        part = self._snapshot[: -self._most - 1 : -1]
        del self._snapshot[-self._most :]
        left = -(-len(self._snapshot) // self._most)
        events = worker_pb2.BlockEvents(first=self._next, end=self._next, restart=restart, left=left)
        _add(events, part, ())
        return events


def _add(events: worker_pb2.BlockEvents, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
    """Add keys of the prefix cache to a message, by their groups."""
    came, went = _by_group(stored), _by_group(removed)
    events.stored.extend(came.pop(0, ()))
    events.removed.extend(went.pop(0, ()))
    for group in sorted(came.keys() | went.keys()):
        events.more.add(group=group, stored=came.get(group), removed=went.get(group))


def _by_group(keys: Iterable[bytes]) -> dict[int, list[int]]:
    """Return group → the hashes of its blocks. A key is a block's digest and, but for group 0, a byte that
    names the group."""
    hashes: dict[int, list[int]] = {}
    for key in keys:
        group = key[DIGEST_BYTES] if len(key) > DIGEST_BYTES else 0
        hashes.setdefault(group, []).append(short(key))
    return hashes
