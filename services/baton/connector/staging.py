"""Messages in pieces, and the host memory for pieces that cannot move in place.

A message is one segment of KV blocks and may be as large as hundreds of megabytes. It travels in *pieces* of
whole wire blocks, so that what must be copied on its way (blocks that are not contiguous in the pool, or lie
on a device) never takes more than a few pieces' memory, however many messages are queued or on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

PIECE_BYTES = 2 << 20
"""Large enough that a piece's cost in Python is small against its copy, and small enough that the blocks of
large models go one by one, which needs no copy wherever they lie."""
STAGING_BYTES = 16 << 20


def piece_blocks(block_bytes: int) -> int:
    """How many wire blocks a piece has at most: as many as fit, and at least one."""
    return max(1, PIECE_BYTES // block_bytes)


def pieces(blocks: Sequence[int], block_bytes: int) -> Iterator[Sequence[int]]:
    """The blocks of each piece of a message, in order."""
    count = piece_blocks(block_bytes)
    return (blocks[start : start + count] for start in range(0, len(blocks), count))


def heap(size: int) -> memoryview:
    return memoryview(bytearray(size))


class Room:
    """Host memory for the pieces of one direction, of which all links of a worker hold no more than ``limit``
    bytes at a time; a piece larger than that gets room when it is alone. Used from several threads."""

    def __init__(self, limit: int = STAGING_BYTES, allocate: Callable[[int], memoryview] = heap) -> None:
        self._limit = limit
        self._allocate = allocate
        self._lock = threading.Lock()
        self._held = 0
        self._slabs: list[memoryview] = []
        """Of ``PIECE_BYTES`` each, held by nobody: fresh memory costs as much as the copy into it."""
        self._waiting: dict[Callable[[], None], None] = {}

    def take(self, size: int, on_free: Callable[[], None]) -> memoryview | None:
        """Memory for a piece; None if there is no room now: ``on_free`` is called once there may be some."""
        with self._lock:
            cost = max(size, PIECE_BYTES)
            if self._held and self._held + cost > self._limit:
                self._waiting[on_free] = None
                return None
            self._held += cost
            if size > PIECE_BYTES:
                self._slabs.clear()
                return self._allocate(size)
            slab = self._slabs.pop() if self._slabs else self._allocate(PIECE_BYTES)
            return slab[:size]

    def give_back(self, memory: memoryview) -> None:
        slab = memoryview(memory.obj)
        with self._lock:
            self._held -= slab.nbytes
            if slab.nbytes == PIECE_BYTES:
                self._slabs.append(slab)
            waiting, self._waiting = self._waiting, {}
        for on_free in waiting:
            on_free()


class Staging:
    """A worker's room for pieces, one for all its connectors. Each direction has its own, so that two workers
    that send to each other never wait for one another.

    ``allocate`` makes its memory: for a pool on a device, such that the device can copy to it by itself.
    """

    def __init__(self, limit: int = STAGING_BYTES, allocate: Callable[[int], memoryview] = heap) -> None:
        self.sending = Room(limit, allocate)
        self.receiving = Room(limit, allocate)
