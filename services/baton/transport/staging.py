"""Messages in pieces, and the memory for pieces that cannot move in place.

A message is one segment of KV blocks and may be as large as hundreds of megabytes. It travels in *pieces* of
whole wire blocks, so that what must be copied on its way (blocks that are not contiguous in the pool, or lie
on a device) never takes more than a few pieces' memory, however many messages are queued or on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

PIECE_BYTES = 2 << 20
"""The size of a piece in bytes, unless one block is larger: so large that its cost in Python is small against
its copy, and so small that the blocks of large models go one by one, which needs no copy wherever they
lie."""
STAGING_BYTES = 16 << 20
DEVICE_PIECE_BYTES = 8 << 20
"""The size of a piece of a pool on a CUDA device. A copy to or from the device costs a launch and a wait, so
it moves many blocks."""
DEVICE_STAGING_BYTES = 64 << 20
LARGEST_PIECE_BYTES = max(PIECE_BYTES, DEVICE_PIECE_BYTES)
"""The largest piece that a sender makes, unless one block is larger: its pool may be in another memory than
the receiver's."""


def piece_blocks(block_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the most wire blocks of a piece: as many as fit, and at least one."""
    return max(1, piece_bytes // block_bytes)


def pieces(
    blocks: Sequence[int], block_bytes: int, piece_bytes: int = PIECE_BYTES, names: int = 1
) -> Iterator[Sequence[int]]:
    """Yield the blocks of each piece of a message, in order. ``names``: those of one block."""
    count = piece_blocks(block_bytes, piece_bytes) * names
    return (blocks[start : start + count] for start in range(0, len(blocks), count))


def heap(size: int) -> memoryview:
    return memoryview(bytearray(size))


class PieceMemory(Protocol):
    """The bytes that a piece passes through: a ``memoryview``, or a view of a device's memory."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


M_co = TypeVar("M_co", bound=PieceMemory, covariant=True)


class StagingRoom(Generic[M_co]):
    """Memory for the pieces of one direction, of which all links of a worker hold no more than ``limit``
    bytes at a time; a larger piece gets room when it is alone. Used from several threads."""

    def __init__(self, limit: int, allocate: Callable[[int], M_co], piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        """The size of the pieces that links make, unless one block is larger."""
        self._limit = limit
        self._allocate = allocate
        self._lock = threading.Lock()
        self._held = 0
        self._slabs: list[M_co] = []
        """Free buffers of ``piece_bytes`` each, kept because fresh memory costs as much as the copy into
        it."""
        self._lent: dict[int, M_co] = {}
        """The buffer of each piece that is out, by the piece's identity."""
        self._waiting: dict[Callable[[], None], None] = {}

    def take(self, size: int, on_free: Callable[[], None]) -> M_co | None:
        """Return memory for a piece; None if there is no room now: ``on_free`` is called once there may be
        some."""
        with self._lock:
            cost = max(size, self.piece_bytes)
            if self._held and self._held + cost > self._limit:
                self._waiting[on_free] = None
                return None
            if size > self.piece_bytes:
                self._slabs.clear()
                slab = self._allocate(size)
            else:
                slab = self._slabs.pop() if self._slabs else self._allocate(self.piece_bytes)
            self._held += cost
            piece = slab[:size]
            self._lent[id(piece)] = slab
            return piece

    def give_back(self, memory: PieceMemory) -> None:
        """Take back what ``take`` returned."""
        with self._lock:
            slab = self._lent.pop(id(memory))
            self._held -= slab.nbytes
            if slab.nbytes == self.piece_bytes:
                self._slabs.append(slab)
            waiting, self._waiting = self._waiting, {}
        for on_free in waiting:
            on_free()

    def fill(self) -> None:
        """Allocate all of it now: a lack of memory shows at the start, and no later message waits for the
        system to find some."""
        with self._lock:
            count = self._limit // self.piece_bytes - self._held // self.piece_bytes - len(self._slabs)
            self._slabs.extend(self._allocate(self.piece_bytes) for _ in range(count))


class StagingBudget(StagingRoom[memoryview]):
    """Host memory for pieces."""

    def __init__(
        self,
        limit: int = STAGING_BYTES,
        allocate: Callable[[int], memoryview] = heap,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(limit, allocate, piece_bytes)


class Staging:
    """A worker's room for pieces, shared by all its connectors. Each direction has room of its own, so that
    two workers that send to each other never wait for one another.

    ``allocate`` makes the memory: for a pool on a device, memory that the device can copy to by itself.
    """

    def __init__(
        self,
        limit: int = STAGING_BYTES,
        allocate: Callable[[int], memoryview] = heap,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.sending = StagingBudget(limit, allocate, piece_bytes)
        self.receiving = StagingBudget(limit, allocate, piece_bytes)
