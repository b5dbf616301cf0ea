"""The events of the prefix cache, digests that entered and left it, in order, for accounts kept elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_KEPT = 1 << 14


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """The net effect of the events from number ``first`` to before ``end``."""

    first: int
    end: int
    stored: tuple[bytes, ...]
    """Digests that are in the cache after the last event, and were not, or not always."""
    removed: tuple[bytes, ...]


class PrefixJournal:
    """The last ``MAX_KEPT`` events, numbered from 0. Not locked: the engine's lock guards it, with the pool.

    The host tier's blocks are not in it: they come back only where copying pays.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=MAX_KEPT)
        self.end = 0
        """Number of the next event."""

    def stored(self, digest: bytes) -> None:
        self._events.append((digest, True))
        self.end += 1

    def removed(self, digest: bytes) -> None:
        self._events.append((digest, False))
        self.end += 1

    def since(self, number: int, most: int) -> PrefixChanges | None:
        """The net effect of at most ``most`` events from ``number`` on; None if they are not kept any
        more."""
        begin = self.end - len(self._events)
        if number < begin:
            return None
        end = min(self.end, number + most)
        last: dict[bytes, bool] = {}
        for at in range(number - begin, end - begin):
            digest, stored = self._events[at]
            last[digest] = stored
        return PrefixChanges(
            number,
            end,
            tuple(digest for digest, stored in last.items() if stored),
            tuple(digest for digest, stored in last.items() if not stored),
        )
