"""A bound of the open calls of callers that have proved nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class NoPlaceError(Exception):
    """Too many calls are open. The text says how many are allowed."""


class Places:
    """A count of the open calls, in all and from each address. Event loop's thread only."""

    def __init__(self, most: int, max_from_one: int) -> None:
        """``most``: most open calls. ``max_from_one``: most of them from one address, which so cannot take
        all places."""
        self._most = most
        self._max_from_one = max_from_one
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._taken.total()

    @contextmanager
    def one_for(self, peer: str) -> Iterator[None]:
        """Hold a place while the context lasts. ``peer``: the caller, as gRPC names it. Raises
        NoPlaceError."""
        address = peer.rpartition(":")[0]
        if self._taken[address] >= self._max_from_one or self._taken.total() >= self._most:
            if not self._taken[address]:
                del self._taken[address]
            raise NoPlaceError(
                f"too many calls are open; at most {self._max_from_one} from one address are allowed, and "
                f"{self._most} in all"
            )
        self._taken[address] += 1
        try:
            yield
        finally:
            self._taken[address] -= 1
            if not self._taken[address]:
                del self._taken[address]
