"""What entered and left the prefix cache, in order, for those who keep an account of it elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MOST_KEPT = 1 << 14


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What the events from number ``first`` to before ``end`` come to."""

    first: int
    end: int
    stored: tuple[bytes, ...]
    """Digests that are in the cache behind the last of them, and were not, or not always."""
    removed: tuple[bytes, ...]


class PrefixJournal:
    """The last ``MOST_KEPT`` events, numbered from 0. Not locked: the engine's lock guards it, with the pool.

    The host tier's blocks are not in it: they come back only where copying pays.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=MOST_KEPT)
        self.end = 0
        """Number of the next event."""

    def stored(self, digest: bytes) -> None:
        self._events.append((digest, True))
        self.end += 1

    def removed(self, digest: bytes) -> None:
        self._events.append((digest, False))
        self.end += 1

    def since(self, number: int, most: int) -> PrefixChanges | None:
        """What at most ``most`` events from ``number`` on come to; None if they are not kept any more."""
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
