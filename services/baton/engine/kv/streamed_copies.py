"""The host tier's copies on a CUDA device: started in order, and run beside the steps."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_tier import CopyPlan
from baton_kernels.blocks import copy_blocks

RING_BYTES = 64 << 20
"""The device's memory that blocks to be saved pass through, in bytes, unless two blocks are larger."""
_FIRST = -1
"""The priority of a stream whose kernels go before those that compute: they are short."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A plan's copies that were started."""

    pages: frozenset[int]
    """The blocks of the pool that they read or write."""
    out: torch.cuda.Event | None
    """The event behind the copies out of the pool. None: there are none."""
    began: torch.cuda.Event
    over: torch.cuda.Event
    """The event behind all copies."""
    into_pool: bool

    def events(self) -> Iterator[torch.cuda.Event]:
        """Yield the events behind which the copies have left the pool alone."""
        if self.out is not None:
            yield self.out
        if self.into_pool:
            yield self.over


class StreamedCopies:
    """Copies between a pool on a device and slots in pinned memory.

    A save goes through a ring of the device's own memory: out of the pool at the device's rate, on one
    stream, and then over the bus on another. Whoever is to write to a block that is being saved waits for the
    first part only, and never on the host's account: a step has ``join`` put its stream behind the copies.
    Restores follow the saves on the second stream.

    The copies need not wait for a forward pass: no pass is using a block of a plan, as all had been given
    back, and writes to them were complete by then.
    """

    def __init__(self, pool: Tensor, num_slots: int, break_even: BreakEven) -> None:
        device = pool.device
        self._pool = pool
        self._break_even = break_even
        self.slots = pinned_slots(pool, num_slots)
        self._out = torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]
        self._bus = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._half = min(num_slots, max(1, RING_BYTES // 2 // pool[0].nbytes))
        """The blocks of half the ring."""
        with torch.cuda.stream(self._out):
            self._rings = [self._new_ring() for _ in range(2)]
        self._next_ring = 0
        self._lock = threading.Lock()
        self._started: deque[_Started] = deque()

    def _new_ring(self) -> tuple[Tensor, torch.cuda.Event]:
        """Return half the ring, and the event behind which its blocks are in their slots."""
        shape = (self._half, *self._pool.shape[1:])
        return torch.empty(shape, dtype=self._pool.dtype, device=self._pool.device), _event()

    def start(self, plan: CopyPlan) -> None:
        """Start a plan's copies. Plans are started one at a time, in order."""
        self.measure()
        began, out = _event(timed=True), None
        began.record(self._bus)
        if plan.saves:
            out = self._save(plan.saves)
        if plan.restores:
            with torch.cuda.stream(self._bus):
                self._copy(self._pool, list(plan.restores), self.slots, list(plan.restores.values()))
        over = _event(timed=True)
        over.record(self._bus)
        pages = frozenset((*plan.saves.values(), *plan.restores))
        with self._lock:
            self._started.append(_Started(pages, out, began, over, bool(plan.restores)))

    def _save(self, saves: Mapping[int, int]) -> torch.cuda.Event:
        """Start the copies of ``saves``, slot -> block. Returns the event behind those out of the pool."""
        slots, blocks = list(saves), list(saves.values())
        for at in range(0, len(slots), self._half):
            ring, emptied = self._rings[self._next_ring]
            self._next_ring = 1 - self._next_ring
            some = blocks[at : at + self._half]
            places = range(len(some))
            out = _event()
            with torch.cuda.stream(self._out):
                self._out.wait_event(emptied)
                self._copy(ring, places, self._pool, some)
                out.record(self._out)
            with torch.cuda.stream(self._bus):
                self._bus.wait_event(out)
                self._copy(self.slots, slots[at : at + self._half], ring, places)
                emptied.record(self._bus)
        return out

    def _copy(
        self, target: Tensor, target_ids: Sequence[int], source: Tensor, source_ids: Sequence[int]
    ) -> None:
        ids = torch.tensor([list(target_ids), list(source_ids)], dtype=torch.int64, pin_memory=True)
        on_device = ids.to(self._pool.device, non_blocking=True)
        copy_blocks(target, on_device[0], source, on_device[1])

    def join(self) -> None:
        """Put what is launched next on the calling thread's stream behind the copies that were started: it
        finds restored blocks restored, and may write to blocks that were saved."""
        stream = torch.cuda.current_stream(self._pool.device)
        for started in self._under_way():
            for event in started.events():
                stream.wait_event(event)

    def settle(self, pages: Collection[int]) -> None:
        """Return when no copy that was started reads or writes these blocks of the pool any more. Callable
        from any thread; it waits for the device, mostly for nothing at all."""
        for started in self._under_way():
            if not started.pages.isdisjoint(pages):
                for event in started.events():
                    event.synchronize()

    def measure(self) -> None:
        """Tell the break-even how long the copies took that are over, by the device's own clock."""
        with self._lock:
            while self._started and _ran(self._started[0].over):
                started = self._started.popleft()
                seconds = started.began.elapsed_time(started.over) / 1000
                self._break_even.copied(len(started.pages), seconds)

    def _under_way(self) -> list[_Started]:
        with self._lock:
            return [started for started in self._started if not _ran(started.over)]


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]


def _ran(event: torch.cuda.Event) -> bool:
    ran: bool = event.query()  # type: ignore[no-untyped-call]
    return ran


def pinned_slots(pool: Tensor, num_slots: int) -> Tensor:
    """Return ``[num_slots, ...]`` blocks like the pool's in host memory that its device reaches by itself.

    Torch's own pinned memory is rounded up to a power of two: this is not.
    """
    size = num_slots * pool[0].nbytes
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # so that there are fewer pages to pin
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    with torch.cuda.device(pool.device):
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(whole.data_ptr(), size, 0))
    if status:
        raise RuntimeError(f"{size} bytes of host memory cannot be pinned: CUDA error {status}")
    slots = whole.view(pool.dtype).view(num_slots, *pool.shape[1:])
    weakref.finalize(slots, _unpin, whole, pool.device).atexit = False
    return slots


def _unpin(whole: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # copies may be under way
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostUnregister(whole.data_ptr())
