"""How many calls of strangers a worker has open at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class NoPlaceError(Exception):
    """There are too many calls; says how many are allowed."""


class Places:
    """Counts the calls that are open, in all and from each address. Event loop's thread only."""

    def __init__(self, most: int, most_from_one: int) -> None:
        """``most_from_one``: from one address, so that one cannot take all places."""
        self._most = most
        self._most_from_one = most_from_one
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._taken.total()

    @contextmanager
    def one_for(self, peer: str) -> Iterator[None]:
        """A place for as long as the context lasts. ``peer``: as gRPC names it. Raises NoPlaceError."""
        address = peer.rpartition(":")[0]
        if self._taken[address] >= self._most_from_one or self._taken.total() >= self._most:
            if not self._taken[address]:
                del self._taken[address]
            raise NoPlaceError(
                f"too many calls are open; at most {self._most_from_one} from one address are allowed, and "
                f"{self._most} in all"
            )
        self._taken[address] += 1
        try:
            yield
        finally:
            self._taken[address] -= 1
            if not self._taken[address]:
                del self._taken[address]
