"""Copies between a pool on a CUDA device and staging memory, beside the kernels that compute."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from baton.transport.base import DeviceView
from baton.transport.staging import DEVICE_PIECE_BYTES

T = TypeVar("T")

_LANES = 4
"""Most copies at a time: more would share the bus, and take more of the device's memory."""
_MAX_ROWS = 1 << 16
"""Most rows of one launch."""
_FIRST = -1
"""The priority of streams whose kernels go before those that compute: they are short."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """A stream, and what a copy on it needs."""

    stream: torch.cuda.Stream
    done: torch.cuda.Event
    slab: Tensor
    """The bytes of the rows of one launch, on the device."""
    ids: Tensor
    """The rows of one launch, in pinned memory."""
    device_ids: Tensor

    def wait(self) -> None:
        """Wait for what was started on the stream. The thread sleeps."""
        self.done.record(self.stream)
        self.done.synchronize()


class DeviceCopies:
    """Copies of any rows of a pool on a CUDA device. Any thread may ask for one, and has it on return.

    A copy has a stream to itself and does not wait for the kernels that compute. So the rows that it reads
    must have been complete before, and those that it writes must not be in use: no page is sent before the
    step that computed it is over, and none is read before all of it has arrived.

    All memory is allocated at the start.
    """

    def __init__(self, device: torch.device, row_bytes: int) -> None:
        """``row_bytes``: the size of the largest row."""
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._allocating = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        slab_bytes = max(DEVICE_PIECE_BYTES, row_bytes)
        for _ in range(_LANES):
            self._lanes.put(self._lane(slab_bytes))

    def _lane(self, slab_bytes: int) -> _Lane:
        return _Lane(
            torch.cuda.Stream(self.device, priority=_FIRST),  # type: ignore[no-untyped-call]
            torch.cuda.Event(blocking=True),  # type: ignore[no-untyped-call]
            self._new(slab_bytes, torch.uint8),
            torch.empty(_MAX_ROWS, dtype=torch.int64, pin_memory=True),
            self._new(_MAX_ROWS, torch.int64),
        )

    def _new(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the device that no kernel which computes has used just before and still may: the
        allocator hands it out again to the stream that it was allocated on."""
        with torch.cuda.stream(self._allocating):
            memory = torch.empty(size, dtype=dtype, device=self.device)
        self._allocating.synchronize()  # other streams use it
        return memory

    def enter(self) -> None:
        """Make the device the calling thread's own, with its context."""
        torch.cuda.set_device(self.device)
        # On a thread whose device this is by default, that alone makes no context current. A call does, and
        # this one waits for no step: no work is put on that stream.
        self._allocating.synchronize()

    def allocate(self, size: int) -> DeviceView:
        """Return memory of the device for pieces."""
        memory = self._new(size, torch.uint8)
        return DeviceView(self.index, memory.data_ptr(), size, memory)

    @contextlib.contextmanager
    def _a_lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            with torch.cuda.stream(lane.stream):
                yield lane
        finally:
            self._lanes.put(lane)

    def compute(self, make: Callable[[], T]) -> T:
        """Return what ``make`` makes on the device, beside the kernels of steps. It is there on return."""
        with self._a_lane() as lane:
            made = make()
            lane.wait()
        return made

    def gather(self, pool: Tensor, rows: Tensor, into: Tensor) -> None:
        """Copy these rows of ``pool`` to ``into``, in host memory or on the device. ``rows``: their indices,
        on the host."""
        with self._a_lane() as lane:
            for start, count in _launches(lane, pool, len(rows)):
                target = into[start : start + count]
                ids = _sent(lane, rows[start : start + count])
                if target.device.type == "cpu":
                    packed = _packed(lane, target)
                    torch.index_select(pool, 0, ids, out=packed)
                    target.copy_(packed, non_blocking=True)
                else:
                    torch.index_select(pool, 0, ids, out=target)
                lane.wait()

    def scatter(self, pool: Tensor, rows: Tensor, content: Tensor) -> None:
        """Copy ``content``, in host memory or on the device, to these rows of ``pool``. ``rows``: their
        indices, on the host."""
        with self._a_lane() as lane:
            for start, count in _launches(lane, pool, len(rows)):
                source = content[start : start + count]
                ids = _sent(lane, rows[start : start + count])
                if source.device.type == "cpu":
                    packed = _packed(lane, source)
                    packed.copy_(source, non_blocking=True)
                    source = packed
                pool.index_copy_(0, ids, source)
                lane.wait()


def _launches(lane: _Lane, pool: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each launch: one, unless a block is larger than what the
    lane has room for."""
    most = min(_MAX_ROWS, lane.slab.nbytes // pool[0].nbytes)
    return ((start, min(most, num_rows - start)) for start in range(0, num_rows, most))


def _sent(lane: _Lane, rows: Tensor) -> Tensor:
    """Return the rows' indices on the device, to where one copy takes them that nothing waits for."""
    ids = lane.ids[: len(rows)]
    ids.copy_(rows)
    on_device = lane.device_ids[: len(rows)]
    on_device.copy_(ids, non_blocking=True)
    return on_device


def _packed(lane: _Lane, rows: Tensor) -> Tensor:
    return lane.slab[: rows.nbytes].view(rows.dtype).view(rows.shape)
