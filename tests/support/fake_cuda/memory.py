"""Memory of a fake device, and the caching allocator in the order of its streams.

Device memory is one mapping that only the device's own work addresses. Freed memory is handed out again as
torch's allocator does it: at once on the stream that it was allocated on, as whatever that stream does next
comes later; on another stream that has used it, only if ``record_stream`` said so and that stream is done.
"""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.support.fake_cuda.streams import Queue, Work

ALIGNMENT = 512
GARBAGE = 0x7FC0
"""What every 16 bits of memory hold that was never written: NaN in every type of float that models compute
with, and far beyond any index as an integer."""
ADDRESSES = 0x7F10_0000_0000_0000
"""Where device 0 claims to lie: no process has memory there, so the host cannot read what it points to."""
ADDRESSES_PER_DEVICE = 1 << 44

Pool = tuple[int, int] | None
"""The graphs whose memory a block belongs to; None: memory of nobody's graphs."""


@dataclass(eq=False, slots=True)
class Block:
    """A run of device memory that one storage has."""

    offset: int
    size: int
    queue: Queue
    """The stream that it was allocated on."""
    pool: Pool
    used_by: set[Queue] = field(default_factory=set)
    """Other streams that its owner said use it."""


class DeviceMemory:
    """The memory of one device. Used from several threads."""

    def __init__(self, index: int, size: int, mark: Callable[[Queue], Work], finish_all: Callable[[], None]):
        """``mark`` notes how far a stream has come; ``finish_all`` waits for all streams."""
        self.size = size
        self.address = ADDRESSES + index * ADDRESSES_PER_DEVICE
        """Where the memory claims to lie."""
        self.bytes: Tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self.start = self.bytes.data_ptr()
        """Where it lies."""
        self.peak = 0
        self._mark = mark
        self._finish_all = finish_all
        self._lock = threading.RLock()
        self._allocated = 0
        self._free = [(0, size)]
        """Offset and size of what no block has, ascending."""
        self._cached: list[Block] = []
        """Blocks without an owner, the last one freed last."""
        self._dropped: deque[Block] = deque()
        """Blocks whose owners have gone since anybody looked."""
        self._awaited: list[tuple[Block, list[Work]]] = []
        """Blocks without an owner that other streams may be using."""

    def drop(self, block: Block) -> None:
        """Take back a block. Takes no lock: the garbage collector calls it anywhere."""
        self._dropped.append(block)

    def allocate(self, size: int, queue: Queue, pool: Pool) -> Block:
        """A block for work on ``queue``. torch.OutOfMemoryError if there is no room."""
        wanted = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._settle()
            block = self._from_cache(wanted, queue, pool) or self._carve(wanted, queue, pool)
            if block is None:
                self.empty_cache()
                block = self._carve(wanted, queue, pool)
            if block is None:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes of {self.size}, of which "
                    f"{self._allocated} are allocated"
                )
            self._allocated += block.size
            self.peak = max(self.peak, self._allocated)
            return block

    def empty_cache(self) -> None:
        """Give cached blocks back to the device, once it has nothing more to do with them."""
        self._finish_all()
        with self._lock:
            self._settle()
            kept = [block for block in self._cached if block.pool is not None]
            spans = self._free + [(b.offset, b.size) for b in self._cached if b.pool is None]
            self._cached = kept
            self._free = []
            for offset, size in sorted(spans):
                if self._free and sum(self._free[-1]) == offset:
                    self._free[-1] = (self._free[-1][0], self._free[-1][1] + size)
                else:
                    self._free.append((offset, size))

    @property
    def allocated(self) -> int:
        with self._lock:
            self._settle()
            return self._allocated

    @property
    def reserved(self) -> int:
        with self._lock:
            return self.size - sum(size for _, size in self._free)

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def _settle(self) -> None:
        """Make blocks that were dropped free for others."""
        while self._dropped:
            block = self._dropped.popleft()
            self._allocated -= block.size
            others, block.used_by = block.used_by - {block.queue}, set()
            if others:
                self._awaited.append((block, [self._mark(queue) for queue in others]))
            else:
                self._cached.append(block)
        awaited, self._awaited = self._awaited, []
        for block, marks in awaited:
            if all(mark.done for mark in marks):
                self._cached.append(block)
            else:
                self._awaited.append((block, marks))

    def _from_cache(self, wanted: int, queue: Queue, pool: Pool) -> Block | None:
        fits = [
            (block.size, -at)
            for at, block in enumerate(self._cached)
            if block.queue is queue and block.pool == pool and wanted <= block.size <= 2 * wanted
        ]
        return self._cached.pop(-min(fits)[1]) if fits else None

    def _carve(self, wanted: int, queue: Queue, pool: Pool) -> Block | None:
        for at, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[at : at + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                return Block(offset, wanted, queue, pool)
        return None


class PinnedMemory:
    """Host memory that the device reaches by itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pieces: list[tuple[int, int]] = []
        """Where each piece begins and its size, ascending. Replaced, never changed: those that read it take
        no lock, as the garbage collector may come in anywhere."""

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A pinned tensor with the content and the strides of one on the host."""
        size = tensor.untyped_storage().nbytes()
        if not size:
            return tensor
        memory = _Mapping(-1, size)
        content = torch.frombuffer(memory, dtype=torch.uint8)
        start = content.data_ptr()
        self.register(start, size)
        weakref.finalize(memory, self.unregister, start)
        pinned = torch.empty(0, dtype=tensor.dtype).set_(
            content.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        return pinned.copy_(tensor)

    @property
    def sizes(self) -> dict[int, int]:
        """The size of each piece, by where it begins."""
        return dict(self._pieces)

    def register(self, start: int, size: int) -> None:
        with self._lock:
            self._pieces = sorted([*self._pieces, (start, size)])

    def unregister(self, start: int) -> None:
        with self._lock:
            self._pieces = [piece for piece in self._pieces if piece[0] != start]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor of the host lies there."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return False
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        first = tensor.data_ptr()
        return self.covers(first, first + last * tensor.itemsize)

    def covers(self, first: int, last: int) -> bool:
        """Whether these addresses lie in one piece of it."""
        pieces = self._pieces
        at = bisect.bisect_right(pieces, first, key=lambda piece: piece[0]) - 1
        return at >= 0 and last < sum(pieces[at])


class _Mapping(mmap.mmap):
    """Memory that tells when nobody has it any more, and costs nothing before it is written to."""
